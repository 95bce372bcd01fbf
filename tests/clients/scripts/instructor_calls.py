"""The ordinary calls of ``instructor``: ``python instructor_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

import instructor
import openai
from calls import call, run_all
from pydantic import BaseModel, ConfigDict

WHERE: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0, "timeout": 300}
ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Which colour has the sky?"}],
    "max_tokens": 128,
    "temperature": 0,
    "max_retries": 0,
}


class Colour(BaseModel):
    """A colour, and nothing else: else the demo model may continue with properties of its own."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["red", "green", "blue"]


def in_mode(function: Callable[[Any], None]) -> None:
    """Makes a call in each mode in which the server holds the model to the schema: by a tool, by a schema."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):

        def made(mode: instructor.Mode = mode) -> None:
            function(mode)

        made.__name__ = f"{function.__name__} by {mode.value}"
        call(made)


@in_mode
def a_structured_answer(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(**WHERE), mode=mode)
    found, answer = client.chat.completions.create_with_completion(**ASKED, response_model=Colour)
    assert isinstance(found, Colour)
    assert answer.usage.completion_tokens > 0


@in_mode
def a_structured_stream(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(**WHERE), mode=mode)
    *_, last = client.chat.completions.create_partial(**ASKED, response_model=Colour)
    assert last.name in ("red", "green", "blue")


@in_mode
def asynchronous(mode: instructor.Mode) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(**WHERE) as plain:
            client = instructor.from_openai(plain, mode=mode)
            assert isinstance(await client.chat.completions.create(**ASKED, response_model=Colour), Colour)

    asyncio.run(ask())


@call
def a_streamed_chat() -> None:
    client = instructor.from_openai(openai.OpenAI(**WHERE))
    chunks = client.chat.completions.create(**{**ASKED, "max_tokens": 3}, response_model=None, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


run_all()
