"""The ordinary calls of ``litellm``, by two of its providers: ``python litellm_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import litellm
from calls import call, run_all
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Say hello."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Paris"]}},
                "required": ["city"],
            },
        },
    }
]
WHERE: dict[str, Any] = {"api_base": sys.argv[1], "api_key": "none", "timeout": 300}


class Colour(BaseModel):
    """What the structured answer is."""

    name: Literal["red", "green", "blue"]


def by_provider(function: Callable[[dict[str, Any]], None]) -> None:
    """Makes a call for each provider."""
    for provider in ("openai", "hosted_vllm"):

        def made(provider: str = provider) -> None:
            function({**WHERE, "model": f"{provider}/demo", "num_retries": 0, "messages": MESSAGES, "max_tokens": 3})

        made.__name__ = f"{function.__name__} by {provider}"
        call(made)


@by_provider
def plain_and_with_every_usual_parameter(asked: dict[str, Any]) -> None:
    assert litellm.completion(**asked).choices[0].message.content
    answer = litellm.completion(
        **asked, temperature=0, top_p=0.9, n=2, stop=["x"], seed=1, presence_penalty=0.1, frequency_penalty=0.1, user="u",
        logprobs=True, top_logprobs=2, logit_bias={"5": 1}, reasoning_effort="low", metadata={"a": "b"}, tools=TOOLS,
        tool_choice="none", parallel_tool_calls=False, extra_body={"top_k": 3},
    )  # fmt: skip
    assert len(answer.choices) == 2


@by_provider
def a_stream_with_usage(asked: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [3]


@by_provider
def tools(asked: dict[str, Any]) -> None:
    litellm.completion(**asked, tools=TOOLS, tool_choice="auto")
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = litellm.completion(**{**asked, "max_tokens": 48}, tools=TOOLS, tool_choice=choice)
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"


@by_provider
def structured_output(asked: dict[str, Any]) -> None:
    # With a limit as large as clients like to send.
    answer = litellm.completion(**{**asked, "max_tokens": 1_000_000}, response_format=Colour)
    assert json.loads(answer.choices[0].message.content)["name"] in ("red", "green", "blue")
    assert litellm.completion(**asked, response_format={"type": "json_object"}).choices


@by_provider
def asynchronous_and_batches(asked: dict[str, Any]) -> None:
    async def ask() -> None:
        assert len(await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(2)))) == 2
        assert [chunk async for chunk in await litellm.acompletion(**asked, stream=True)]

    asyncio.run(ask())
    assert len(litellm.batch_completion(**{**asked, "messages": [MESSAGES, MESSAGES]})) == 2


@by_provider
def embeddings(asked: dict[str, Any]) -> None:
    where = {**WHERE, "model": asked["model"]}
    assert len(litellm.embedding(**where, input=["a", "b"]).data) == 2
    assert len(litellm.embedding(**where, input=["a"], encoding_format="float").data) == 1
    assert len(asyncio.run(litellm.aembedding(**where, input=["a"])).data) == 1


@call
def a_router() -> None:
    members = [
        {"model_name": "any", "litellm_params": {**WHERE, "model": f"{name}/demo"}}
        for name in ("openai", "hosted_vllm")
    ]
    router = litellm.Router(model_list=members, num_retries=1)
    asked: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 3}
    assert router.completion(**asked).choices[0].message.content
    assert asyncio.run(router.acompletion(**asked)).choices[0].message.content
    assert len(router.embedding(model="any", input=["a"]).data) == 1


@call
def completions() -> None:
    asked = {**WHERE, "model": "text-completion-openai/demo", "max_tokens": 3, "temperature": 0}
    assert litellm.text_completion(**asked, prompt="The capital of France is", echo=True, logprobs=1).choices[0].text
    assert len(litellm.text_completion(**asked, prompt=["a", "b"], n=1, best_of=1, stop=["z"], seed=1).choices) == 2
    assert list(litellm.text_completion(**asked, prompt="Once upon a time", stream=True))
    assert asyncio.run(litellm.atext_completion(**asked, prompt="Once upon a time")).choices[0].text


run_all()
