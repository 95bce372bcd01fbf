"""The ordinary calls of ``pydantic-ai``: ``python pydantic_ai_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import ModelRequest
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
model = OpenAIChatModel("demo", provider=provider)
SETTINGS: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "timeout": 300}
LONG = {**SETTINGS, "max_tokens": 64, "parallel_tool_calls": False}


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Paris"]


def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


async def text_and_history() -> None:
    """Instructions, system prompts, what was said before."""
    agent = Agent(model, model_settings=SETTINGS, system_prompt="You are kind.", instructions="You are brief.")
    answer = await agent.run("Say hello.")
    assert answer.output
    assert answer.usage.output_tokens == 3
    assert (await agent.run("And again?", message_history=answer.all_messages())).output
    async with agent.run_stream("Say hello.") as stream:
        assert "".join([piece async for piece in stream.stream_text(delta=True)])
    assert (await model_request(model, [ModelRequest.user_text_prompt("Hi")], model_settings=SETTINGS)).parts


async def every_usual_setting() -> None:
    """Those that an agent may be given."""
    settings = {
        **SETTINGS, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 1, "logit_bias": {"5": 1},
        "stop_sequences": ["x"], "openai_reasoning_effort": "low", "openai_logprobs": True, "openai_top_logprobs": 1,
        "openai_user": "u", "openai_service_tier": "auto", "extra_body": {"top_k": 3},
    }  # fmt: skip
    assert (await Agent(model, model_settings=settings).run("Say hello.")).output


async def tools() -> None:
    """A tool that the model may call, step by step."""
    agent = Agent(model, model_settings=SETTINGS, tools=[weather])
    async with agent.iter("Say hello.") as run:
        assert [type(node).__name__ async for node in run][-1] == "End"


async def output(kind: Any) -> None:
    """Output of a type."""
    found = await Agent(model, model_settings=LONG, output_type=kind, retries=0).run("Which colour?")
    assert found.output is not None


async def streamed_output() -> None:
    """The same as it comes."""
    for kind in (NativeOutput(Colour), ToolOutput(Colour)):
        async with Agent(model, model_settings=LONG, output_type=kind).run_stream("Which colour?") as stream:
            assert isinstance([piece async for piece in stream.stream_output()][-1], Colour)


async def embeddings() -> None:
    """Of a query and of documents."""
    embedder = Embedder(OpenAIEmbeddingModel("demo", provider=provider))
    assert len((await embedder.embed_query("a")).embeddings) == 1
    assert len((await embedder.embed_documents(["a", "b"])).embeddings) == 2


async def main() -> None:
    """Runs them all, a few at a time."""
    kinds = (NativeOutput(Colour), ToolOutput(Colour), Colour, [Colour, City], NativeOutput([Colour, City]), bool)
    room = asyncio.Semaphore(4)

    async def within(call: Coroutine[Any, Any, None]) -> None:
        async with room:
            await call

    single = (text_and_history(), every_usual_setting(), tools(), streamed_output(), embeddings())
    await asyncio.gather(*map(within, (*single, *map(output, kinds))))


asyncio.run(main())
print("ok")
