"""The ordinary calls of ``pydantic-ai``: ``python pydantic_ai_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))
SETTINGS = {"max_tokens": 6, "temperature": 0.0, "timeout": 300, "seed": 1, "parallel_tool_calls": False}


class Colour(BaseModel):
    """What the structured answer is."""

    name: Literal["red", "green", "blue"]


def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


async def main() -> None:
    """Runs them all."""
    agent = Agent(model, model_settings=SETTINGS, instructions="You are brief.")
    answer = await agent.run("Say hello.")
    assert answer.output
    assert (await agent.run("And again?", message_history=answer.all_messages())).output
    async with agent.run_stream("Say hello.") as stream:
        assert "".join([piece async for piece in stream.stream_text(delta=True)])
    assert (await Agent(model, model_settings=SETTINGS, tools=[weather]).run("Say hello.")).output
    for output in (NativeOutput(Colour), ToolOutput(Colour)):
        found = await Agent(model, model_settings={**SETTINGS, "max_tokens": 64}, output_type=output).run(
            "Which colour?"
        )
        assert found.output.name in ("red", "green", "blue"), output


asyncio.run(main())
print("ok")
