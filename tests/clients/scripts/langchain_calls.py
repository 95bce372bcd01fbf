"""The ordinary calls of ``langchain-openai``: ``python langchain_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from typing import Any, Literal

from calls import call, run_all
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

WHERE: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "model": "demo"}
SETTINGS = {**WHERE, "temperature": 0, "max_retries": 0, "timeout": 300, "stream_usage": True}
chat, caller = ChatOpenAI(**SETTINGS, max_tokens=3), ChatOpenAI(**SETTINGS, max_tokens=64)
text = OpenAI(**WHERE, max_tokens=3, temperature=0)


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


@tool
def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


@call
def defaults() -> None:
    assert ChatOpenAI(**WHERE, max_tokens=3).invoke("Say hello.").content


@call
def every_usual_parameter() -> None:
    asked = ChatOpenAI(
        **SETTINGS, max_tokens=3, n=2, seed=1, logprobs=True, top_logprobs=2, presence_penalty=0.1, frequency_penalty=0.1,
        top_p=0.9, stop=["x"], logit_bias={5: 1}, verbosity="low", reasoning_effort="low", service_tier="auto",
        metadata={"a": "b"}, store=False, extra_body={"top_k": 3},
    )  # fmt: skip
    assert len(asked.generate([[HumanMessage("Say hello.")]]).generations[0]) == 2


@call
def a_stream_with_usage() -> None:
    pieces = list(chat.stream("Say hello."))
    assert "".join(piece.content for piece in pieces)
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 3


@call
def batches() -> None:
    assert len(chat.batch(["One?", "Two?"])) == 2


@call
def asynchronous() -> None:
    async def ask() -> None:
        assert [piece async for piece in chat.astream("Say hello.")]
        answers = await asyncio.gather(chat.ainvoke("One?"), chat.abatch(["Two?"]), text.ainvoke("Once"))
        assert all(answers)
        assert "on_chat_model_end" in [event["event"] async for event in chat.astream_events("Hi", version="v2")]

    asyncio.run(ask())


@call
def a_chain() -> None:
    chain = (
        ChatPromptTemplate.from_messages([("system", "Be {how}."), ("human", "{question}")]) | chat | StrOutputParser()
    )
    assert chain.invoke({"how": "brief", "question": "Say hello."})


@call
def tools_if_the_model_likes() -> None:
    chat.bind_tools([weather]).invoke("How is the weather in Rome?")
    turns = [
        SystemMessage("Be brief."),
        HumanMessage("How is the weather in Rome?"),
        AIMessage("", tool_calls=[{"id": "1", "name": "weather", "args": {"city": "Rome"}}]),
        ToolMessage("rain", tool_call_id="1"),
    ]
    assert chat.bind_tools([weather]).invoke(turns)


@call
def a_tool_that_must_be_called() -> None:
    for choice in ("weather", "any"):
        asked = caller.bind_tools([weather], tool_choice=choice, strict=True)
        assert asked.invoke("How is the weather in Rome?").tool_calls[0]["name"] == "weather"
    pieces = list(caller.bind_tools([weather], tool_choice="any", strict=True).stream("How is the weather in Rome?"))
    assert {chunk["name"] for piece in pieces for chunk in piece.tool_call_chunks if chunk["name"]} == {"weather"}


@call
def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        found = caller.with_structured_output(Colour, method=method, strict=True).invoke("Which colour?")
        assert found.name in ("red", "green", "blue"), method


@call
def completions() -> None:
    assert text.invoke("The capital of France is")
    assert "".join(text.stream("Once upon a time"))
    asked = OpenAI(**WHERE, max_tokens=3, temperature=0, n=2, best_of=2, seed=1, logprobs=1)
    assert [len(found) for found in asked.generate(["a", "b"]).generations] == [2, 2]


@call
def embeddings() -> None:
    model = OpenAIEmbeddings(**WHERE, check_embedding_ctx_length=False)  # which would fetch OpenAI's tokenizer
    assert len(model.embed_documents(["a", "b"])) == 2
    assert len(asyncio.run(model.aembed_query("a"))) == len(model.embed_query("a"))


run_all()
