"""A schema that is not strict never fails for what cannot be enforced; a strict one is refused, with the field."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from sapwood_common.grammar.compile import GrammarBuilder, parser_limits
from sapwood_common.grammar.json_schema import GrammarError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource

LENIENT = GrammarOptions(lenient=True)
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
NAMED = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

# What clients' libraries write, each with a part that is still to be enforced.
NOT_ENFORCEABLE: dict[str, Any] = {
    "look-ahead": {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
    "look-behind": {"type": "string", "pattern": r"(?<=a)b"},
    "back-reference": {"type": "string", "pattern": r"^(a|b)\1$"},
    "word boundary": {"type": "string", "pattern": r"\bword\b"},
    "expression of another dialect": {"type": "string", "pattern": r"^[^]\cA$"},
    "broken expression": {"type": "string", "pattern": "("},
    "pattern of names": {"type": "object", "patternProperties": {"^(?=a)": {"type": "string"}}},
    "largest float": {"type": "number", "maximum": 1.7976931348623157e308},
    "smallest float": {"type": "number", "minimum": -1.7976931348623157e308, "exclusiveMinimum": -1e308},
    "safe integers": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "multiple of much": {"type": "integer", "multipleOf": 10**12},
    "multiple of little": {"type": "number", "multipleOf": 1e-30},
    "long text": {"type": "string", "maxLength": 2**53},
    "longer text": {"type": "string", "minLength": 2**40},
    "long array": {"type": "array", "maxItems": 2**53, "items": {"type": "string"}},
    "many properties": {"type": "object", "minProperties": 2, "maxProperties": 10**9},
    "unknown type": {"type": "any"},
    "types of Python": {"type": ["str", None]},
    "required of a property": {"type": "string", "required": True},
    "names as text": {"type": "object", "required": "a"},
    "bound as text": {"type": "integer", "minimum": "3"},
    "negative length": {"type": "string", "minLength": -1},
    "empty enum": {"enum": []},
    "empty choice": {"anyOf": []},
    "properties in a list": {"type": "object", "properties": [{"name": "a"}]},
    "items as a number": {"type": "array", "items": 5},
    "schema elsewhere": {"$ref": "https://example.org/schema.json"},
    "schema nowhere": {"$ref": "#/$defs/gone"},
    "unknown format": {"type": "string", "format": "hostname-of-mine"},
    "not": {"not": {"type": "string"}},
    "condition": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "distinct": {"type": "array", "uniqueItems": True, "contains": {"const": 1}, "minContains": 2},
    "dependent": {"type": "object", "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {"required": ["c"]}}},
    "names": {"type": "object", "propertyNames": {"pattern": "^(?!_)"}},
    "either, but not both": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "unevaluated": {"type": "object", "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
}

ENFORCED = {"long text", "longer text", "long array", "safe integers", "64 bits", "empty enum", "empty choice"}
"""These the engine enforces after all; of the empty ones, that there is no such property."""
SILENT = {"many properties", "required of a property", "smallest float", "unevaluated"}
"""These the engine ignores and does not name."""


@pytest.fixture(scope="module")
def builder() -> GrammarBuilder:
    return GrammarBuilder(())


def admits(builder: GrammarBuilder, lark: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(builder._tokenizer, lark, log_level=0, limits=parser_limits())
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize("name", NOT_ENFORCEABLE)
def test_what_cannot_be_enforced_is_left_out_and_the_rest_holds(builder: GrammarBuilder, name: str) -> None:
    schema = {**NAMED, "properties": {**NAMED["properties"], "x": NOT_ENFORCEABLE[name]}}
    lark, left_out = builder.compile_noting(GrammarSource("json_schema", json.dumps(schema), LENIENT))
    assert admits(builder, lark, '{"n": 1}')
    assert not admits(builder, lark, '{"n": "a"}')
    assert not admits(builder, lark, "{}")
    assert bool(left_out) or name in ENFORCED or name in SILENT


@pytest.mark.parametrize("name", NOT_ENFORCEABLE)
def test_tools_with_what_cannot_be_enforced_are_called(builder: GrammarBuilder, name: str) -> None:
    schema = {**NAMED, "properties": {**NAMED["properties"], "x": NOT_ENFORCEABLE[name]}}
    good = {"type": "json_schema", "json_schema": NAMED, "lenient": False, "field": "tools[0]"}
    other = {"type": "json_schema", "json_schema": schema, "lenient": True, "field": "tools[1]"}
    tags = [{"type": "tag", "begin": f"{name}:", "content": part} for name, part in (("a", good), ("b", other))]
    lark = builder.compile(GrammarSource("structural_tag", json.dumps({"format": {"type": "or", "elements": tags}})))
    assert admits(builder, lark, 'b:{"n": 1}')
    assert not admits(builder, lark, 'b:{"n": "a"}')
    assert not admits(builder, lark, 'a:{"n": 1, "x": 1}')


@pytest.mark.parametrize("name", ["look-ahead", "unknown type", "largest float", "distinct", "many properties"])
def test_a_strict_schema_is_refused_with_its_field(builder: GrammarBuilder, name: str) -> None:
    schema = {**NAMED, "properties": {**NAMED["properties"], "x": NOT_ENFORCEABLE[name]}}
    good = {"type": "json_schema", "json_schema": NAMED, "field": "tools[0]"}
    wrong = {"type": "json_schema", "json_schema": schema, "field": "tools[1]"}
    tag = {"format": {"type": "or", "elements": [good, wrong]}}
    with pytest.raises(GrammarError) as caught:
        builder.compile(GrammarSource("structural_tag", json.dumps(tag)))
    assert caught.value.field == "tools[1]"


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "minLength": 2, "maxLength": 1, "pattern": "(?!a)"},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)
def test_a_schema_that_nothing_matches_is_an_error_though_lenient(builder: GrammarBuilder, schema: Any) -> None:
    with pytest.raises(GrammarError):
        builder.compile(GrammarSource("json_schema", json.dumps(schema), LENIENT))


def test_expressions_in_a_schema_with_many_are_tried_one_by_one(builder: GrammarBuilder) -> None:
    properties = {f"p{n}": {"type": "string", "pattern": f"^a{n}$" if n % 2 else "(?!a)"} for n in range(40)}
    schema = {"type": "object", "properties": properties, "required": ["p1", "p2"]}
    lark, left_out = builder.compile_noting(GrammarSource("json_schema", json.dumps(schema), LENIENT))
    assert admits(builder, lark, '{"p1": "a1", "p2": "anything"}')
    assert not admits(builder, lark, '{"p1": "anything", "p2": "b"}')
    assert any("pattern" in what for what in left_out)
