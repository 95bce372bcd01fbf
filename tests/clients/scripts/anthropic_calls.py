"""The ordinary calls of the official ``anthropic`` client: ``python anthropic_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from typing import Any, Literal

import anthropic
from calls import call, run_all
from pydantic import BaseModel

WHERE: dict[str, Any] = {
    "base_url": sys.argv[1].removesuffix("/v1"),
    "api_key": "none",
    "max_retries": 0,
    "timeout": 300,
}
client = anthropic.Anthropic(**WHERE)
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
SHORT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 3}
LONG = {**SHORT, "max_tokens": 128}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Colour(BaseModel):
    """What the structured answer is."""

    name: Literal["red", "green", "blue"]


@call
def a_streamed_chat() -> None:
    with client.messages.stream(**SHORT, system="You are brief.") as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens == 3


@call
def an_answer_with_every_usual_parameter() -> None:
    answer = client.messages.create(
        **SHORT, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["x"], metadata={"user_id": "u"}, service_tier="auto", output_config={"effort": "low"},
        extra_body={"seed": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5},
    )  # fmt: skip
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("max_tokens", "end_turn", "stop_sequence")


@call
def a_tool_is_called_and_answered() -> None:
    choices: tuple[Any, ...] = ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True})
    for choice in choices:
        answer = client.messages.create(**LONG, tools=[WEATHER], tool_choice=choice)
        made = next(block for block in answer.content if block.type == "tool_use")
        assert (made.name, made.input["city"] in ("Rome", "Paris")) == ("weather", True)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": made.id, "content": "rain"}]}
    turns = [*HELLO, {"role": "assistant", "content": answer.content}, result]
    assert client.messages.create(**{**SHORT, "messages": turns}, tools=[WEATHER]).content


@call
def a_streamed_tool_call() -> None:
    with client.messages.stream(**LONG, tools=[WEATHER], tool_choice={"type": "any"}) as stream:
        assert "input_json" in [event.type for event in stream]
        assert any(block.type == "tool_use" for block in stream.get_final_message().content)


@call
def a_structured_answer() -> None:
    answer = client.messages.parse(**LONG, output_format=Colour)
    assert answer.parsed_output.name in ("red", "green", "blue")


@call
def tokens_are_counted() -> None:
    assert client.messages.count_tokens(model="demo", messages=HELLO).input_tokens > 3


@call
def models() -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


@call
def many_at_once() -> None:
    async def ask() -> None:
        async with anthropic.AsyncAnthropic(**WHERE) as asynchronous:
            answers = await asyncio.gather(*(asynchronous.messages.create(**SHORT) for _ in range(4)))
            assert all(answer.content for answer in answers)

    asyncio.run(ask())


@call
def mistakes_are_told_plainly() -> None:
    try:
        client.messages.create(**{**SHORT, "model": "claude"})
    except anthropic.NotFoundError as error:
        assert "claude" in str(error)
    else:
        raise AssertionError("there is no such model")


run_all()
