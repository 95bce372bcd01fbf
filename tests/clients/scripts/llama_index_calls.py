"""The ordinary calls of ``llama-index``: ``python llama_index_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from typing import Any, Literal

from calls import call, run_all
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

WHERE: dict[str, Any] = {
    "model": "demo",
    "api_base": sys.argv[1],
    "api_key": "none",
    "temperature": 0,
    "timeout": 300,
    "max_retries": 0,
    "context_window": 2048,
}
chat = OpenAILike(**WHERE, max_tokens=3, is_chat_model=True)
caller = OpenAILike(
    **WHERE, max_tokens=128, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True
)
text = OpenAILike(**WHERE, max_tokens=3, is_chat_model=False)
HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Say hello.")]


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


TOOL = FunctionTool.from_defaults(weather)


@call
def a_streamed_chat() -> None:
    *_, last = chat.stream_chat(HELLO)
    assert last.message.content
    assert chat.chat(HELLO).message.content


@call
def a_tool_call() -> None:
    answer = caller.chat_with_tools([TOOL], user_msg="How is the weather in Rome?", tool_required=True)
    (made, *_) = caller.get_tool_calls_from_response(answer)
    assert made.tool_name == "weather"
    assert TOOL(**made.tool_kwargs).content.startswith("rain in ")
    *_, last = caller.stream_chat_with_tools([TOOL], user_msg="How is the weather in Rome?", tool_required=True)
    assert caller.get_tool_calls_from_response(last)[0].tool_name == "weather"


@call
def tools_if_the_model_likes() -> None:
    assert chat.metadata.is_chat_model
    answer = caller.chat_with_tools([TOOL], user_msg="Say hello.")
    caller.get_tool_calls_from_response(answer, error_on_no_tool_call=False)


@call
def a_structured_answer() -> None:
    assert caller.structured_predict(Colour, PromptTemplate("Which colour has {what}?"), what="the sky").name
    assert caller.as_structured_llm(Colour).chat(HELLO).raw.name in ("red", "green", "blue")


@call
def completions() -> None:
    assert text.complete("The capital of France is").text
    *_, last = text.stream_complete("Once upon a time")
    assert last.text


@call
def asynchronous() -> None:
    async def ask() -> None:
        assert (await chat.achat(HELLO)).message.content
        assert [piece async for piece in await chat.astream_chat(HELLO)]

    asyncio.run(ask())


@call
def embeddings() -> None:
    model = OpenAILikeEmbedding(model_name="demo", api_base=sys.argv[1], api_key="none")
    assert len(model.get_text_embedding_batch(["a", "b"])) == 2
    assert len(model.get_query_embedding("a")) == 640


run_all()
