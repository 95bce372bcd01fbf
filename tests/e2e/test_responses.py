"""OpenAI's Responses API, used with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


TOOLS: Any = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]


@pytest.fixture
def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_streamed_answer_is_the_one_that_is_told_whole_and_can_be_gone_on_from(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "input": "Name three colours.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    *events, last = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.type in ("response.completed", "response.incomplete")
    final = last.response
    assert text and text == whole.output_text == final.output_text
    assert whole.usage is not None and final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    more = client.responses.create(**{**asked, "input": "And three more."}, previous_response_id=whole.id)
    assert more.usage is not None and more.usage.input_tokens > whole.usage.total_tokens
    assert client.responses.retrieve(more.id).output_text == more.output_text
    client.responses.delete(more.id)


def test_a_function_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    called = client.responses.create(
        model="demo", input="How is the weather in Paris?", tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=128,
    )  # fmt: skip
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert call.name == "Weather" and Weather.model_validate_json(call.arguments)
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    answer = client.responses.create(
        model="demo", input=result, previous_response_id=called.id, tools=TOOLS, max_output_tokens=8
    )
    assert answer.status in ("completed", "incomplete")


def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="demo", input="How is the weather in Paris?", text_format=Weather, max_output_tokens=128
    )
    assert isinstance(answer.output_parsed, Weather)
