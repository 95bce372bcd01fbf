"""The ordinary calls of ``guidance``, whose grammars the server holds to: ``guidance_calls.py http://127.0.0.1:8000/v1``."""

import json
import re
import sys
from typing import Any

from calls import call, run_all
from guidance import assistant, gen, select, system, user
from guidance import json as json_gen
from guidance.models import OpenAI
from guidance.models.experimental import SglangModel, VLLMModel

WHERE: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "echo": False}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def asked(model: Any, question: str) -> Any:
    """A conversation up to the assistant's turn."""
    with system():
        model += "Be brief."
    with user():
        model += question
    return model


@call
def a_chat_by_openai() -> None:
    model = asked(OpenAI("demo", **WHERE), "Say hello.")
    with assistant():
        model += gen("x", max_tokens=3)
    assert model["x"]


@call
def a_schema_by_openai() -> None:
    model = asked(OpenAI("demo", **WHERE), "A colour?")
    with assistant():
        model += json_gen(name="x", schema=SCHEMA, max_tokens=48)
    assert json.loads(model["x"])["colour"]


@call
def a_choice_by_grammar() -> None:
    model = asked(VLLMModel("demo", **WHERE), "Yes or no?")
    with assistant():
        model += select(["yes", "no"], name="x")
    assert model["x"] in ("yes", "no")


@call
def text_and_answers_in_one_grammar() -> None:
    model = asked(VLLMModel("demo", **WHERE), "A code?")
    with assistant():
        model += "code " + gen("digits", regex="[0-9]{2}") + "-" + select(["a", "b"], name="letter")
    assert re.fullmatch("[0-9]{2}", model["digits"]) and model["letter"] in ("a", "b")


@call
def a_schema_by_grammar() -> None:
    model = asked(VLLMModel("demo", **WHERE), "A colour?")
    with assistant():
        model += json_gen(name="x", schema=SCHEMA)
    assert json.loads(model["x"])["colour"]


@call
def a_regular_expression_and_a_schema_by_sglang() -> None:
    model = asked(SglangModel("demo", **WHERE), "A code?")
    with assistant():
        model += gen("x", regex="[0-9]{2}[a-c]", max_tokens=8)
    assert re.fullmatch("[0-9]{2}[a-c]", model["x"])
    model = asked(SglangModel("demo", **WHERE), "A colour?")
    with assistant():
        model += json_gen(name="y", schema=SCHEMA, max_tokens=48)
    assert json.loads(model["y"])["colour"]


run_all()
