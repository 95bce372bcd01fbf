"""The ordinary calls of ``smolagents``: ``python smolagents_calls.py http://127.0.0.1:8000/v1``."""

import json
import sys
from typing import Any

from calls import call, run_all
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent

MESSAGES: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Which colour has the sky?"}]}]
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


class Weather(Tool):
    """A tool, in the form of this library."""

    name = "weather"
    description = "Tells the weather of a city."
    inputs = {"city": {"type": "string", "description": "which city"}}  # noqa: RUF012 - as the library asks for it
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"It is sunny in {city}."


def model(max_tokens: int = 8) -> Any:
    return OpenAIServerModel("demo", api_base=sys.argv[1], api_key="none", temperature=0, max_tokens=max_tokens)


@call
def a_chat() -> None:
    answer = model().generate(MESSAGES, stop_sequences=["Observation:"])
    assert answer.content and answer.token_usage.output_tokens <= 8


@call
def a_stream() -> None:
    deltas = list(model().generate_stream(MESSAGES))
    assert sum(delta.token_usage.output_tokens for delta in deltas if delta.token_usage) == 8


@call
def a_structured_answer() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": COLOUR}}
    assert json.loads(model(64).generate(MESSAGES, response_format=form).content)["colour"] in ("red", "green", "blue")


@call
def a_tool_is_called() -> None:
    """It asks for some call always. The arguments are what a small model makes of them."""
    answer = model(128).generate(MESSAGES, tools_to_call_from=[Weather()], stop_sequences=["Observation:"])
    assert answer.tool_calls[0].function.name == "weather"


@call
def an_agent() -> None:
    agent = ToolCallingAgent(tools=[Weather()], model=model(96), max_steps=1, verbosity_level=0)
    agent.run("How is the weather in Paris?")
    assert agent.memory.steps[1].model_output_message.tool_calls


run_all()
