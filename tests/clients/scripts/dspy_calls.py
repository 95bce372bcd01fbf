"""The ordinary calls of ``dspy``: ``python dspy_calls.py http://127.0.0.1:8000/v1``.

It is told what the server can do, as it knows only vendors' models. Answers come as JSON that the server enforces: the demo model
would not keep to the fields of dspy's chats by itself.
"""

import asyncio
import sys
from typing import Any, Literal

import dspy
from calls import call, run_all
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

ACCESS = AccessPolicy(provider="sapwood", env_keys=("SAPWOOD_API_KEY",), base_url=sys.argv[1])
register_provider(
    ProviderDefinition.chat(ACCESS, compat=OpenAIChatCompat()),
    supports=ModelSupport(function_calling=True, response_schema=True),
)
WHERE: dict[str, Any] = {"api_base": sys.argv[1], "api_key": "none", "cache": False, "num_retries": 0, "timeout": 300}
lm = dspy.LM("sapwood/demo", max_tokens=128, temperature=0.0, **WHERE)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Paint(dspy.Signature):
    """Name the colour."""

    thing: str = dspy.InputField()
    colour: Literal["red", "green", "blue"] = dspy.OutputField()


class Ask(dspy.Signature):
    """Call the tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


@call
def a_chat() -> None:
    short = dspy.LM("sapwood/demo", max_tokens=3, temperature=0.0, **WHERE)
    assert short("Say hello.")[0]
    assert short(messages=[{"role": "user", "content": "Hi"}])[0]


@call
def other_apis_by_litellm() -> None:
    settings: dict[str, Any] = {**WHERE, "temperature": 0.0, "engine": "litellm"}
    assert dspy.LM("openai/demo", max_tokens=3, **settings)("Say hello.")[0]
    assert dspy.LM("text-completion-openai/demo", model_type="text", max_tokens=3, **settings)("Once upon a time")[0]
    assert dspy.LM("openai/demo", model_type="responses", max_tokens=16, **settings)("Say hello.")[0]


@call
def a_structured_answer() -> None:
    assert dspy.Predict(Paint)(thing="the sky").colour in ("red", "green", "blue")


@call
def a_streamed_answer() -> None:
    async def ask() -> None:
        program = dspy.streamify(dspy.Predict(Paint))
        found = [piece async for piece in program(thing="the sky")]
        assert isinstance(found[-1], dspy.Prediction)
        assert found[-1].colour in ("red", "green", "blue")

    asyncio.run(ask())


@call
def a_tool_call() -> None:
    adapter = dspy.JSONAdapter(use_native_function_calling=True)
    with dspy.context(adapter=adapter, lm=lm):
        ask = dspy.Predict(Ask)
        found = ask(
            question="How is the weather in Rome?", tools=[dspy.Tool(weather)], config={"tool_choice": "required"}
        )
    assert found.calls.tool_calls[0].name == "weather"


@call
def log_probabilities_and_several_answers() -> None:
    scored = dspy.LM("openai/demo", engine="litellm", logprobs=True, max_tokens=3, temperature=0.0, **WHERE)
    (found,) = scored("Say hello.")
    assert found["text"] and len(found["logprobs"].content) == 3
    assert len(dspy.LM("openai/demo", engine="litellm", max_tokens=2, temperature=0.7, n=3, **WHERE)("Say hello.")) == 3


@call
def an_optimiser_that_scores_by_a_metric() -> None:
    examples = [dspy.Example(thing=thing, colour="blue").with_inputs("thing") for thing in ("the sky", "the sea")]
    teach = dspy.BootstrapFewShot(metric=lambda example, found, trace=None: found.colour in ("red", "green", "blue"))
    taught = teach.compile(dspy.Predict(Paint), trainset=examples)
    assert len(taught.demos) == 2
    assert taught(thing="grass").colour in ("red", "green", "blue")


@call
def embeddings() -> None:
    embedder = dspy.Embedder("openai/demo", api_base=sys.argv[1], api_key="none", caching=False)
    assert embedder(["a", "b"]).shape == (2, 640)


run_all()
