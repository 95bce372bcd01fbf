"""The tools that a request offers, with the types of their arguments for parsers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from sapwood_common.errors import InvalidArgumentError

_NO_TYPES: frozenset[str] = frozenset()
_MAX_SCHEMA_DEPTH = 16
_MAX_PARTS = 100_000
"""How many parts of one schema are looked at, so that references cannot make it grow without end."""
_UNIONS = ("anyOf", "oneOf")
_STRING_KEYWORDS = ("pattern", "minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The arguments of one tool.

    Attributes:
        types: Argument name to the JSON types it may have ("string", "integer", ...); empty if the schema does not say.
        other_types: The types of arguments that ``types`` does not name.
        required: The names of those that must be given.
    """

    types: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    other_types: frozenset[str] = _NO_TYPES
    required: frozenset[str] = frozenset()


_UNKNOWN = ToolArguments()


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools on offer.

    Attributes:
        arguments: Tool name to its arguments.
    """

    arguments: Mapping[str, ToolArguments] = field(default_factory=lambda: MappingProxyType({}))

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """The types an argument may have; empty if unknown."""
        known = self.arguments.get(tool, _UNKNOWN)
        return known.types.get(argument, known.other_types)

    def may_take(self, tool: str, argument: str) -> bool:
        """Whether a tool may have an argument of this name: its schema names it, or names none."""
        known = self.arguments.get(tool, _UNKNOWN).types
        return argument in known or not known

    def names(self, argument: str) -> bool:
        """Whether some tool has an argument of this name."""
        return any(argument in known.types for known in self.arguments.values())

    def fits(self, tool: str, given: Collection[str]) -> bool:
        """Whether a tool can be called with arguments of exactly these names."""
        known = self.arguments[tool]
        return known.required <= set(given) and set(given) <= set(known.types)

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
        found: dict[str, ToolArguments] = {}
        for index, tool in enumerate(tools):
            function = tool.get("function", tool)
            if not isinstance(function, dict):
                raise InvalidArgumentError("a tool's function is a JSON object", field=f"tools[{index}].function")
            name = function.get("name")
            if not isinstance(name, str) or not name:
                raise InvalidArgumentError("a tool has a name", field=f"tools[{index}].function.name")
            found[name] = _read_arguments(function.get("parameters"))
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


def _read_arguments(schema: Any) -> ToolArguments:
    """The arguments that an object schema describes, also behind references and in the parts of ``allOf`` and unions."""
    types: dict[str, frozenset[str]] = {}
    required: set[str] = set()
    other = _NO_TYPES
    pending = deque([(schema, _MAX_SCHEMA_DEPTH, True)])
    left = [_MAX_PARTS]
    while pending and left[0] > 0:
        left[0] -= 1
        part, depth, must = pending.popleft()
        part = _resolved(part, schema)
        if not isinstance(part, dict) or depth == 0:
            continue
        properties = part.get("properties")
        for key, value in (properties if isinstance(properties, dict) else {}).items():
            known = types.get(key, _NO_TYPES)
            here = _types(value, schema, _MAX_SCHEMA_DEPTH, left) or _NO_TYPES
            types[key] = here if not known or must else known | here
        names = part.get("required")
        if must and isinstance(names, list):
            required.update(name for name in names if isinstance(name, str))
        other = other or _types(part.get("additionalProperties"), schema, _MAX_SCHEMA_DEPTH, left) or _NO_TYPES
        for word in ("allOf", *_UNIONS):
            if isinstance(part.get(word), list):
                pending += [(inner, depth - 1, must and word == "allOf") for inner in part[word]]
    return ToolArguments(types, other, frozenset(required))


def schema_types(schema: Any, root: Any = None) -> frozenset[str]:
    """The JSON types a schema allows; empty if it does not say.

    Args:
        schema: The schema.
        root: The schema into which its references point.
    """
    return _types(schema, root, _MAX_SCHEMA_DEPTH, [_MAX_PARTS]) or _NO_TYPES


def _types(schema: Any, root: Any, depth: int, left: list[int]) -> frozenset[str] | None:
    """The types a schema allows, None if it does not say; ``left`` counts the parts that may still be looked at."""
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        return None
    schema = _resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    limits: list[frozenset[str]] = []
    types = schema.get("type")
    if isinstance(types, str):
        limits.append(frozenset([types]))
    elif isinstance(types, list):
        limits.append(frozenset(name for name in types if isinstance(name, str)))
    elif isinstance(schema.get("enum"), list):
        limits.append(frozenset(map(json_type, schema["enum"])))
    elif "const" in schema:
        limits.append(frozenset([json_type(schema["const"])]))
    for union in _UNIONS:
        if isinstance(schema.get(union), list) and schema[union]:
            parts = [_types(part, root, depth - 1, left) for part in schema[union]]
            if all(part is not None for part in parts):
                limits.append(frozenset[str]().union(*(part for part in parts if part is not None)))
    if isinstance(schema.get("allOf"), list):
        limits += [part for inner in schema["allOf"] if (part := _types(inner, root, depth - 1, left)) is not None]
    if not limits:
        return frozenset(["string"]) if any(word in schema for word in _STRING_KEYWORDS) else None
    found = limits[0]
    for limit in limits[1:]:
        found = _common(found, limit) or found
    if schema.get("nullable") is True:
        found |= {"null"}
    return found or None


def _common(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The types that both allow; an integer is a number."""
    numbers = {"integer", "number"}
    is_integer = bool(one & numbers and other & numbers) and "number" not in one & other
    return (one & other) | ({"integer"} if is_integer else set())


def _resolved(schema: Any, root: Any) -> Any:
    """The schema at the end of a chain of references into ``root``; None if one points nowhere."""
    for _ in range(_MAX_SCHEMA_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        schema = _pointed_at(reference, root)
    return None


def _pointed_at(reference: str, root: Any) -> Any:
    """The part of ``root`` that a reference (a JSON pointer behind ``#``) names; None if there is no such part."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and len(key) < 6 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


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
