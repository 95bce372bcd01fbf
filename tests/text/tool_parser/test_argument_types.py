"""What the tools' schemas say about values that stand between tags without a type."""

import json

import pytest

from sapwood_text.output_parser import ParserOptions
from sapwood_text.tool_parser.tools import Tools

DEFINITIONS = {
    "Zip": {"type": "string"},
    "Alias": {"$ref": "#/$defs/Zip"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b": {"type": "string"},
}


def value_of(schema, text, parse_every_way, parameters=None):
    parameters = parameters or {"properties": {"x": schema}, "$defs": DEFINITIONS, "definitions": DEFINITIONS}
    tools = Tools.from_objects([{"function": {"name": "f", "parameters": parameters}}])
    output = f"<function=f><parameter=x>{text}</parameter></function>"
    (call,) = parse_every_way(ParserOptions(tool_parser="qwen3_coder", tools=tools), output).tool_calls
    return json.loads(call.arguments)["x"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Zip"},
        {"$ref": "#/definitions/Alias", "description": "of the city"},
        {"$ref": "#/$defs/a~1b"},
        {"allOf": [{"$ref": "#/$defs/Zip"}, {"description": "of the city"}]},
        {"allOf": [{}, {"type": "string"}], "default": "1"},
        {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
        {"type": ["string", "null"], "allOf": [{"type": "string"}]},
        {"pattern": "^[0-9]+$"},
        {"type": "string", "nullable": True},
    ],
)
def test_a_string_behind_a_reference_stays_a_string(schema, parse_every_way):
    assert value_of(schema, "10001", parse_every_way) == "10001"


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/None"}, {"$ref": "http://x/y"}, {}])
def test_a_reference_that_ends_nowhere_says_nothing(schema, parse_every_way):
    assert value_of(schema, "10001", parse_every_way) == 10001


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": {"x": {"type": "string"}}}}},
        {"allOf": [{"properties": {"y": {}}}, {"properties": {"x": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"x": {"type": "string"}}}, {"properties": {"y": {"type": "integer"}}}]},
        {"additionalProperties": {"type": "string"}},
    ],
)
def test_properties_are_found_wherever_the_schema_has_them(parameters, parse_every_way):
    assert value_of(None, "10001", parse_every_way, parameters) == "10001"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "object"}, "{'a': {'b': (1,)}}", {"a": {"b": [1]}}),
        ({"type": "object"}, "{'it\\'s': \"a\"}", {"it's": "a"}),
        ({}, "{'a': 1}", {"a": 1}),
        ({"type": ["array", "string"]}, "['a']", ["a"]),
        ({"type": "string"}, "['a']", "['a']"),
        ({}, "[a](b)", "[a](b)"),
        ({}, "(a)", "(a)"),
        ({"type": "integer"}, "140.0", 140),
        ({"type": "integer"}, "1.5", 1.5),
        ({"type": "number"}, "140.0", 140.0),
        ({"type": "integer"}, '"5"', 5),
        ({"type": "object"}, '"{\\"a\\": 1}"', {"a": 1}),
        ({"type": "boolean"}, "yes", "yes"),
    ],
)
def test_values_are_read_as_the_type_that_they_must_have(schema, text, value, parse_every_way):
    found = value_of(schema, text, parse_every_way)
    assert found == value and type(found) is type(value)


def test_a_schema_that_grows_without_end_is_read_in_bounded_steps():
    definitions = {str(depth): {"anyOf": [{"$ref": f"#/$defs/{depth + 1}"}] * 8} for depth in range(16)}
    parameters = {"properties": {str(index): {"$ref": "#/$defs/0"} for index in range(100)}, "$defs": definitions}
    tools = Tools.from_objects([{"name": "f", "parameters": parameters}])
    assert tools.types("f", "0") == frozenset()
