"""``response_format``, and as extensions ``regex``, ``ebnf``, ``structural_tag`` (SGLang), ``structured_outputs``,
``guided_...`` (vLLM), ``json_schema`` and ``grammar`` (llama.cpp and TGI).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.openai.types import GenerationRequest
from sapwood_router.request.context import AnswerGrammar

_FIELD = "response_format"
_SCHEMA = "response_format.json_schema"
_OBJECT = '{"type": "object"}'
_STRUCTURED = "structured_outputs"
_KINDS = {
    "json": "a JSON schema, as an object or as text",
    "regex": "an expression",
    "choice": "one or more texts, none empty",
    "grammar": "the text of a grammar, or an object with type (json, regex) and value",
    "json_object": "a boolean",
    "structural_tag": "JSON as text",
}
"""vLLM's kinds of structured output, and what each must be."""
_MOST_CHOICES = 4096
_ONE_TERMINAL = "start: CHOICE\nCHOICE: "
"""The lexer takes thousands of texts; the parser takes no rule of more than 2000."""
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_PARAMETERS = (
    ("regex", "regex"),
    ("ebnf", "grammar"),
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("structural_tag", "structural_tag"),
    ("json_schema", "json"),
    ("grammar", "grammar"),
)
"""Parameters of their own, each with the kind that its value is."""
_EMPTY_ASKS_NOTHING = ("structural_tag", "json_schema", "grammar")
_NONE = (None,) * len(_PARAMETERS)
_NO_OPTION = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
"""vLLM's options that false leaves out."""


def answer_grammar(request: GenerationRequest) -> tuple[AnswerGrammar | None, str]:
    """The constraint on the text, and the parameter that sets it; None: none.

    Types of ``response_format`` are OpenAI's ``text``, ``json_object`` (with a ``schema`` or without) and ``json_schema``, and
    SGLang's and vLLM's ``structural_tag``. Parts of a schema that cannot be enforced are ignored unless it is "strict".

    Raises:
        InvalidArgumentError: It is malformed, or there are several that differ.
    """
    values = (
        *(request.regex, request.ebnf, request.guided_json),
        *(request.guided_regex, request.guided_choice, request.guided_grammar),
        *(request.structural_tag, request.json_schema, request.grammar),
    )
    if request.response_format is None and request.structured_outputs is None and values == _NONE:
        return None, _FIELD  # the usual case
    found = _response_format(request.response_format)
    parameters = [] if found[0] is None else [found]
    for (name, kind), value in zip(_PARAMETERS, values, strict=True):
        if value is not None and (value != "" or name not in _EMPTY_ASKS_NOTHING):
            parameters.append((_of_kind(kind, value, name), name))
    if request.structured_outputs is not None:
        parameters += _structured_outputs(request.structured_outputs)
    if len(parameters) > 1 and all(grammar == parameters[0][0] for grammar, _ in parameters):
        del parameters[1:]  # clients send one grammar by the names of several versions of vLLM
    if len(parameters) > 1:
        names = ", ".join(field.partition(".")[0] for _, field in parameters)
        raise InvalidArgumentError(f"only one of {names} can be set", field=parameters[1][1].partition(".")[0])
    return parameters[0] if parameters else (None, _FIELD)


def _structured_outputs(given: dict[str, Any]) -> list[tuple[AnswerGrammar | None, str]]:
    """vLLM's ``structured_outputs``."""
    found = []
    for name, value in given.items():
        field = f"{_STRUCTURED}.{name}"
        if value is None or (name in _NO_OPTION and value is False):
            continue
        if name in _KINDS:
            if value is not False:  # json_object is a flag
                found.append((_of_kind(name, value, field), field))
        elif name == "disable_any_whitespace":
            if value is not True:
                raise InvalidArgumentError(f"{field} must be a boolean", field=field)
        else:
            raise InvalidArgumentError(f"{field} is not supported", field=field)
    if len(found) != 1:
        raise InvalidArgumentError(f"{_STRUCTURED} must have one of {', '.join(_KINDS)}", field=_STRUCTURED)
    if given.get("disable_any_whitespace"):
        found = [(replace(grammar, any_whitespace=False), field) for grammar, field in found]
    return [*found]


def _of_kind(kind: str, value: Any, field: str) -> AnswerGrammar:
    """What vLLM's parameters of these kinds ask for. Of JSON schemas, what cannot be enforced is ignored."""
    match kind, value:
        case "json", dict():
            return AnswerGrammar("json_schema", msgspec.json.encode(value).decode(), lenient=True)
        case "json", str():
            return AnswerGrammar("json_schema", value, lenient=True)
        case "json_object", True:
            return AnswerGrammar("json_schema", _OBJECT)
        case "regex", str():
            return AnswerGrammar("regex", value)
        case "grammar", str():
            return AnswerGrammar("ebnf", value)
        case "grammar", {"type": "json" | "json_object", "value": dict() | str() as schema}:  # TGI's
            return _of_kind("json", schema, field)
        case "grammar", {"type": "regex", "value": str() as expression}:
            return AnswerGrammar("regex", expression)
        case "structural_tag", str():
            return AnswerGrammar("structural_tag", value)
        case "choice", [str(), *_]:
            if len(value) > _MOST_CHOICES:
                raise InvalidArgumentError(f"at most {_MOST_CHOICES} choices, got {len(value)}", field=field)
            if all(isinstance(choice, str) and choice for choice in value):
                return AnswerGrammar("ebnf", f"{_ONE_TERMINAL}{' | '.join(map(_literal, value))}")
    raise InvalidArgumentError(f"{field} must be {_KINDS[kind]}", field=field)


def _literal(text: str) -> str:
    return _ENCODER.encode(text)


def _response_format(value: Any) -> tuple[AnswerGrammar | None, str]:
    if value is None:
        return None, _FIELD
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{_FIELD} must be an object", field=_FIELD)
    match value.get("type"):
        case "text":
            return None, _FIELD
        case "json_object":
            return _object(value.get("schema"))
        case "json_schema":
            return _json_schema(value.get("json_schema")), f"{_SCHEMA}.schema"
        case "structural_tag":
            return AnswerGrammar("structural_tag", msgspec.json.encode(value).decode()), _FIELD
        case other:
            raise InvalidArgumentError(
                f"{_FIELD} of type {other!r} is not supported; there are text, json_object, json_schema and structural_tag",
                field=f"{_FIELD}.type",
            )


def _object(schema: Any) -> tuple[AnswerGrammar, str]:
    """A JSON object, of a schema if there is one, as llama.cpp's server and others take it."""
    if schema is None:
        return AnswerGrammar("json_schema", _OBJECT), _FIELD
    field = f"{_FIELD}.schema"
    if not isinstance(schema, dict):
        raise InvalidArgumentError(f"{field} must be an object", field=field)
    return AnswerGrammar("json_schema", msgspec.json.encode(schema).decode(), lenient=True), field


def _json_schema(value: Any) -> AnswerGrammar:
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{_SCHEMA} is required", field=_SCHEMA)
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise InvalidArgumentError(f"{_SCHEMA}.name is required", field=f"{_SCHEMA}.name")
    strict, schema = value.get("strict"), value.get("schema")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidArgumentError(f"{_SCHEMA}.strict must be a boolean", field=f"{_SCHEMA}.strict")
    if schema is None:
        return AnswerGrammar("json_schema", _OBJECT)
    if not isinstance(schema, dict):
        raise InvalidArgumentError(f"{_SCHEMA}.schema must be an object", field=f"{_SCHEMA}.schema")
    return AnswerGrammar("json_schema", msgspec.json.encode(schema).decode(), lenient=strict is not True)
