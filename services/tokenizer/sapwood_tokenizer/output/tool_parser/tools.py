"""The tools that a request offers, with the types of their arguments for parsers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sapwood_common.errors import InvalidArgumentError

_NO_TYPES: frozenset[str] = frozenset()
_MAX_SCHEMA_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Tools:
    """Names and argument types of the tools on offer.

    Attributes:
        argument_types: Tool name to argument name to the JSON types it may have ("string", "integer", ...). An argument
            whose type the schema does not say is left out.
    """

    argument_types: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=lambda: MappingProxyType({}))

    def __contains__(self, name: str) -> bool:
        return name in self.argument_types

    def __len__(self) -> int:
        return len(self.argument_types)

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """The types an argument may have; empty if unknown."""
        return self.argument_types.get(tool, {}).get(argument, _NO_TYPES)

    @classmethod
    def from_json(cls, text: str) -> Tools:
        """Reads a JSON array in the form of OpenAI's ``tools``; "" is no tools.

        Raises:
            InvalidArgumentError: It is not such an array. The field is "tools".
        """
        return cls.from_objects(load_tools(text))

    @classmethod
    def from_objects(cls, tools: list[dict[str, Any]]) -> Tools:
        """Reads the objects of OpenAI's ``tools``.

        Raises:
            InvalidArgumentError: One is not in that form. The field is "tools[i]...".
        """
        found: dict[str, Mapping[str, frozenset[str]]] = {}
        for index, tool in enumerate(tools):
            function = tool.get("function", tool)
            if not isinstance(function, dict):
                raise InvalidArgumentError("a tool's function is a JSON object", field=f"tools[{index}].function")
            name = function.get("name")
            if not isinstance(name, str) or not name:
                raise InvalidArgumentError("a tool has a name", field=f"tools[{index}].function.name")
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            if not isinstance(properties, dict):
                properties = {}
            types = {key: schema_types(value) for key, value in properties.items()}
            found[name] = {key: value for key, value in types.items() if value}
        return cls(found)


def load_tools(text: str) -> list[dict[str, Any]]:
    """Decode a JSON array of tools; "" is none.

    Raises:
        InvalidArgumentError: It is not an array of objects. The field is "tools".
    """
    if not text:
        return []
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"tools is not JSON: {error}", field="tools") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidArgumentError("tools is a JSON array of objects", field="tools")
    return tools


def schema_types(schema: Any, depth: int = _MAX_SCHEMA_DEPTH) -> frozenset[str]:
    """The JSON types a schema allows; empty if it does not say."""
    if not isinstance(schema, dict) or depth == 0:
        return _NO_TYPES
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset([types])
    if isinstance(types, list):
        return frozenset(name for name in types if isinstance(name, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(json_type, schema["enum"]))
    if "const" in schema:
        return frozenset([json_type(schema["const"])])
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            parts = [schema_types(part, depth - 1) for part in schema[union]]
            return frozenset().union(*parts) if parts and all(parts) else _NO_TYPES
    return _NO_TYPES


def json_type(value: Any) -> str:
    """The JSON Schema name of a decoded value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
