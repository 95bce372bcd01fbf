"""Structured output and forced calls of the demo model, a base model that would write anything else: the masks make it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 12},
        "cities": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["capital", "cities"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "clock"}},
]
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=120)


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["capital", "cities"]
    assert len(value["capital"]) <= 12
    assert 0 <= value["cities"] <= 99


def test_an_answer_matches_its_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "france", "schema": SCHEMA, "strict": True}}

    def whole() -> Any:
        return client.chat.completions.create(
            model="demo", messages=QUESTION, response_format=form, max_tokens=80, temperature=0
        ).choices[0]

    def streamed() -> str:
        stream = client.chat.completions.create(
            model="demo", messages=QUESTION, response_format=form, max_tokens=80, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def hot() -> str:
        answer = client.completions.create(
            model="demo", prompt="France:", extra_body={"response_format": form}, max_tokens=80, temperature=1.5, seed=3
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(3) as pool:
        choice, text, drawn = (pool.submit(job) for job in (whole, streamed, hot))
    assert choice.result().finish_reason == "stop"
    check(text.result())
    assert text.result() == choice.result().message.content
    check(drawn.result())


def test_a_text_matches_its_expression(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="A date: ", extra_body={"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}, max_tokens=30
    )
    assert len(answer.choices[0].text) == 10
    assert answer.choices[0].finish_reason == "stop"


def test_a_forced_call_is_one(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}

    def ask(choice: Any) -> Any:
        return client.chat.completions.create(
            model="demo", messages=QUESTION, tools=TOOLS, tool_choice=choice, max_tokens=120, parallel_tool_calls=False
        )

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, (named, "required")))
    for choice, answer in zip((named, "required"), answers, strict=True):
        (call,) = answer.choices[0].message.tool_calls or ()
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        assert call.type == "function"
        if call.function.name == "weather":
            check(call.function.arguments)
        else:
            assert (call.function.name, json.loads(call.function.arguments), choice) == ("clock", {}, "required")


def test_a_schema_that_cannot_be_enforced_is_refused(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "set", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=QUESTION, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"
    assert "uniqueItems" in caught.value.message
