"""``response_format`` and the extensions ``regex`` and ``ebnf`` (named as in SGLang), as the pipeline takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.openai.types import GenerationRequest
from sapwood_router.structure import AnswerGrammar

_FIELD = "response_format"
_SCHEMA = "response_format.json_schema"
_OBJECT = '{"type": "object"}'


def answer_grammar(request: GenerationRequest) -> tuple[AnswerGrammar | None, str]:
    """What the text must match, and the parameter that says so; None: anything.

    Types are OpenAI's ``text``, ``json_object`` and ``json_schema``, and SGLang's and vLLM's ``structural_tag``. Of a schema that
    is not "strict", what cannot be enforced is ignored.

    Raises:
        InvalidArgumentError: It is malformed, or there are several.
    """
    found = [
        (grammar, field)
        for grammar, field in (
            _response_format(request.response_format),
            (None if request.regex is None else AnswerGrammar("regex", request.regex), "regex"),
            (None if request.ebnf is None else AnswerGrammar("ebnf", request.ebnf), "ebnf"),
        )
        if grammar is not None
    ]
    if len(found) > 1:
        names = ", ".join(field.partition(".")[0] for _, field in found)
        raise InvalidArgumentError(f"only one of {names} can be set", field=found[1][1].partition(".")[0])
    return found[0] if found else (None, _FIELD)


def _response_format(value: Any) -> tuple[AnswerGrammar | None, str]:
    if value is None:
        return None, _FIELD
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{_FIELD} must be an object", field=_FIELD)
    match value.get("type"):
        case "text":
            return None, _FIELD
        case "json_object":
            return AnswerGrammar("json_schema", _OBJECT), _FIELD
        case "json_schema":
            return _json_schema(value.get("json_schema")), f"{_SCHEMA}.schema"
        case "structural_tag":
            return AnswerGrammar("structural_tag", msgspec.json.encode(value).decode()), _FIELD
        case other:
            raise InvalidArgumentError(f"{_FIELD} of type {other!r} is not supported", field=f"{_FIELD}.type")


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
