"""The ordinary calls of Haystack: ``python haystack_calls.py http://127.0.0.1:8000/v1``."""

import json
import sys
from typing import Any, Literal

from calls import call, run_all
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel

WHERE: dict[str, Any] = {"api_base_url": sys.argv[1], "api_key": Secret.from_token("none"), "timeout": 300}
ASKED = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("Which colour has the sky?")]
WEATHER = Tool(
    name="weather",
    description="Tells the weather of a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
    function=lambda city: f"It is sunny in {city}.",
)


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


def answer(messages: list[ChatMessage], tools: Any = None, **options: Any) -> ChatMessage:
    generator = OpenAIChatGenerator(
        model="demo", generation_kwargs={"max_tokens": 8, "temperature": 0} | options, **WHERE
    )
    found: ChatMessage = generator.run(messages, tools=tools)["replies"][0]
    return found


@call
def a_chat() -> None:
    assert answer(ASKED).meta["usage"]["completion_tokens"] == 8


@call
def a_stream() -> None:
    pieces: list[str] = []
    generator = OpenAIChatGenerator(model="demo", generation_kwargs={"max_tokens": 8}, **WHERE)
    whole = generator.run(ASKED, streaming_callback=lambda chunk: pieces.append(chunk.content))["replies"][0]
    assert whole.text == "".join(pieces)


@call
def a_tool_is_called_and_answered() -> None:
    called = answer(ASKED, [WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=128)
    (wanted,) = called.tool_calls
    assert wanted.tool_name == "weather"
    result = ChatMessage.from_tool(WEATHER.invoke(**wanted.arguments), origin=wanted)
    assert answer([*ASKED, called, result], [WEATHER], max_tokens=4)


@call
def a_structured_answer() -> None:
    assert json.loads(answer(ASKED, response_format=Colour, max_tokens=64).text)["name"] in ("red", "green", "blue")


@call
def embeddings() -> None:
    text = OpenAITextEmbedder(model="demo", **WHERE).run("a cat")["embedding"]
    (document,) = OpenAIDocumentEmbedder(model="demo", progress_bar=False, **WHERE).run([Document(content="a cat")])[
        "documents"
    ]
    assert len(text) == len(document.embedding)


run_all()
