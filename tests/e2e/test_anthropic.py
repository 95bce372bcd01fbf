"""Anthropic's API, used with its own client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

pytestmark = pytest.mark.slow
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "weather", "description": "The weather of the next days.", "input_schema": SCHEMA, "strict": True}
]
QUESTION: Any = [{"role": "user", "content": "How is the weather in Paris?"}]


@pytest.fixture
def client(cluster: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://{cluster.http}", api_key="none", max_retries=0, timeout=120)


def test_a_streamed_message_is_the_one_that_is_answered_whole(client: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": "demo",
        "max_tokens": 12,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and [block.type for block in whole.content] == ["text"]
    assert "".join(block.text for block in final.content if block.type == "text") == text
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model="demo", messages=asked["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic) -> None:
    called = client.messages.create(
        model="demo", max_tokens=128, messages=QUESTION, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}
    )
    assert called.stop_reason == "tool_use"
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert call.name == "weather" and isinstance(call.input["city"], str) and call.input["days"] in range(1, 10)
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]}
    said: Any = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in called.content]}
    answer = client.messages.create(model="demo", max_tokens=8, messages=[*QUESTION, said, result], tools=TOOLS)
    assert answer.stop_reason in ("max_tokens", "end_turn")


def test_an_answer_matches_its_schema(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(model="demo", max_tokens=128, messages=QUESTION, output_config=form)
    (block,) = answer.content
    assert block.type == "text" and set(json.loads(block.text)) == {"city", "days"}
