"""The ordinary calls of ``openai-agents``, by both APIs that it knows: ``python openai_agents_calls.py
http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import ModelBehaviorError
from calls import call, run_all
from pydantic import BaseModel

set_tracing_disabled(True)
SHORT = ModelSettings(max_tokens=16, temperature=0)
LONG = ModelSettings(max_tokens=128, temperature=0)
FORCED = ModelSettings(max_tokens=128, temperature=0, tool_choice="required", parallel_tool_calls=False)
KINDS: dict[str, Any] = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


@function_tool
def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


def by_api(function: Callable[[Any], Any]) -> None:
    """Makes a call by each API."""
    for name, kind in KINDS.items():

        def made(kind: Any = kind) -> None:
            async def ask() -> None:
                async with openai.AsyncOpenAI(
                    base_url=sys.argv[1], api_key="none", max_retries=0, timeout=300
                ) as client:
                    await function(kind(model="demo", openai_client=client))

            asyncio.run(ask())

        made.__name__ = f"{function.__name__} by {name}"
        call(made)


async def pieces_of(run: Any) -> str:
    """What an answer was streamed as."""
    events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    return "".join(data.delta for data in events if data.type == "response.output_text.delta")


async def whole(model: Any, run: Any) -> Any:
    """The answer of a run. By the newer API the client takes none that ``max_tokens`` cut short, as those often are."""
    try:
        return await run
    except ModelBehaviorError as error:
        assert isinstance(model, OpenAIResponsesModel)
        assert "max_output_tokens" in str(error)
        return None


@by_api
async def a_chat(model: Any) -> None:
    agent = Agent(name="brief", instructions="You are brief.", model=model, model_settings=SHORT)
    answer = await whole(model, Runner.run(agent, "Say hello."))
    if answer is not None:
        assert answer.final_output
        await whole(model, Runner.run(agent, [*answer.to_input_list(), {"role": "user", "content": "And again?"}]))


@by_api
async def a_streamed_chat(model: Any) -> None:
    agent = Agent(name="brief", instructions="You are brief.", model=model, model_settings=SHORT)
    run = Runner.run_streamed(agent, "Say hello.")
    if (text := await whole(model, pieces_of(run))) is not None:
        assert text == run.final_output


@by_api
async def a_streamed_answer_of_a_type(model: Any) -> None:
    agent = Agent(name="painter", model=model, model_settings=LONG, output_type=Colour)
    run = Runner.run_streamed(agent, "Which colour?")
    assert Colour.model_validate_json(await pieces_of(run)) == run.final_output


@by_api
async def a_tool_call(model: Any) -> None:
    agent = Agent(
        name="caller", model=model, model_settings=FORCED, tools=[weather], tool_use_behavior="stop_on_first_tool"
    )
    found = await Runner.run(agent, "How is the weather in Rome?")
    assert found.final_output.startswith("rain in ")


@by_api
async def a_tool_call_and_what_the_model_says_of_it(model: Any) -> None:
    agent = Agent(
        name="caller", model=model, model_settings=ModelSettings(max_tokens=128, temperature=0, tool_choice="weather"),
        tools=[weather],
    )  # fmt: skip
    found = await whole(model, Runner.run(agent, "How is the weather in Rome?", max_turns=2))
    assert found is None or isinstance(found.final_output, str)


@by_api
async def a_structured_answer(model: Any) -> None:
    agent = Agent(name="painter", model=model, model_settings=LONG, output_type=Colour)
    assert (await Runner.run(agent, "Which colour?")).final_output.name in ("red", "green", "blue")


run_all()
