"""The ordinary calls of AutoGen: ``python autogen_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from calls import call, run_all
from pydantic import BaseModel

CAN: dict[str, Any] = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}
ASKED = [SystemMessage(content="Be brief."), UserMessage(content="Which colour has the sky?", source="user")]


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


async def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


def with_client(max_tokens: int) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    """Makes a call with a client of its own, in an event loop of its own."""

    def decorate(function: Callable[[Any], Awaitable[None]]) -> None:
        async def run() -> None:
            client = OpenAIChatCompletionClient(
                model="demo",
                base_url=sys.argv[1],
                api_key="none",
                model_info=CAN,
                temperature=0,
                max_tokens=max_tokens,
                timeout=300,
            )
            await function(client)
            await client.close()

        def made() -> None:
            asyncio.run(run())

        made.__name__ = function.__name__
        call(made)

    return decorate


@with_client(8)
async def a_chat(client: Any) -> None:
    assert (await client.create(ASKED)).usage.completion_tokens == 8


@with_client(8)
async def a_stream_with_usage(client: Any) -> None:
    *pieces, whole = [each async for each in client.create_stream(ASKED, include_usage=True)]
    assert whole.content == "".join(pieces)
    assert whole.usage.completion_tokens == 8


@with_client(128)
async def a_tool_is_called(client: Any) -> None:
    tool = FunctionTool(weather, description="Tells the weather of a city.", strict=True)
    options = {"parallel_tool_calls": False}
    found = await client.create(ASKED, tools=[tool], tool_choice="required", extra_create_args=options)
    assert found.content[0].name == "weather"


@with_client(64)
async def a_structured_answer(client: Any) -> None:
    assert Colour.model_validate_json((await client.create(ASKED, json_output=Colour)).content)


@with_client(16)
async def an_agent(client: Any) -> None:
    agent = AssistantAgent("helper", client, tools=[weather], reflect_on_tool_use=True, model_client_stream=True)
    assert (await agent.run(task="Hello")).messages[-1].content


run_all()
