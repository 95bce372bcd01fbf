"""The ordinary calls of ``outlines``, by three ways to a server: ``outlines_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import json
import re
import sys
from typing import Any, Literal

import openai
import outlines
from calls import call, run_all
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict

WHERE: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0, "timeout": 300}
ASKED: dict[str, Any] = {"max_tokens": 48, "temperature": 0}
client = openai.OpenAI(**WHERE)
MAKERS = {"vllm": outlines.from_vllm, "sglang": outlines.from_sglang, "openai": outlines.from_openai}


class Colour(BaseModel):
    """A colour."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["red", "green", "blue"]


def each_way(*ways: str) -> Any:
    """Makes a call for each of these ways to a model."""

    def make(function: Any) -> None:
        for way in ways:

            def made(way: str = way) -> None:
                function(MAKERS[way](client, "demo"))

            made.__name__ = f"{function.__name__} by {way}"
            call(made)

    return make


@each_way("vllm", "sglang", "openai")
def a_text_and_a_stream(model: Any) -> None:
    assert model("Say hello.", max_tokens=3)
    assert "".join(model.stream("Say hello.", max_tokens=3))


@each_way("vllm", "sglang", "openai")
def a_schema(model: Any) -> None:
    assert Colour.model_validate_json(model("A colour as JSON:", Colour, **ASKED)).name


@each_way("vllm", "sglang")
def a_choice_and_a_type(model: Any) -> None:
    assert model("Yes or no?", Literal["Yes", "No"], **ASKED) in ("Yes", "No")
    assert re.fullmatch(r"[+-]?(0|[1-9][0-9]*)", model("A number:", int, max_tokens=200, temperature=0)[:40])


@each_way("vllm", "sglang")
def a_regular_expression(model: Any) -> None:
    assert re.fullmatch("[0-9]{3}-[a-c]", model("A code:", Regex("[0-9]{3}-[a-c]"), **ASKED))


@each_way("vllm")
def a_lark_grammar(model: Any) -> None:
    assert re.fullmatch("(ab|cd){2}", model("Letters:", CFG('start: pair pair\npair: "ab" | "cd"\n'), **ASKED))


@each_way("sglang")
def an_ebnf_grammar(model: Any) -> None:
    assert model("Letters:", CFG('root ::= "ab" | "cd"'), **ASKED) in ("ab", "cd")


@call
def asynchronous_and_a_generator() -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(**WHERE) as plain:
            return str(await outlines.from_vllm(plain, "demo")("A colour as JSON:", Colour, **ASKED))

    assert json.loads(asyncio.run(ask()))["name"]
    generator = outlines.Generator(outlines.from_vllm(client, "demo"), Literal["a", "b"])
    assert generator("Which?", **ASKED) in ("a", "b")


run_all()
