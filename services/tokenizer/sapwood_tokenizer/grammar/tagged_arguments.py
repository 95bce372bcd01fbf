"""Formats of arguments written one by one between tags, or as keywords: each property of an object schema has its own.

Strings between tags have no quotes, so only ``enum`` and ``const`` of their schema are enforced there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sapwood_common.errors import InvalidArgumentError
from sapwood_text.tool_parser.tools import schema_types
from sapwood_tokenizer.grammar.formats import ANYTHING, Format, either, json_value, optional, sequence, tag, text
from sapwood_tokenizer.grammar.offered_tool import OfferedTool

_LONGEST_CHAIN = 16
_NAME = re.compile(r"\w[\w.\-]*")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a tool.

    Attributes:
        name: Its name.
        schema: What its value must match, with the definitions it may refer to.
        required: Whether it must be there.
        is_string: Whether it can only be a string; None where the schema does not give its type.
        lenient: Whether parts of the schema that cannot be enforced are ignored.
        field: The field of the tool's schema, for errors.
    """

    name: str
    schema: dict[str, Any]
    required: bool
    is_string: bool | None
    lenient: bool
    field: str


def arguments_of(tool: OfferedTool) -> list[Argument] | None:
    """The named properties of a tool's schema, in its order. None: a name cannot be written between tags, so anything may be.

    Raises:
        InvalidArgumentError: A name cannot be written between tags, and the tool is strict. The field is "tools".
    """
    schema = tool.schema
    properties = schema.get("properties")
    required = schema.get("required")
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = []
    for key, value in (properties if isinstance(properties, dict) else {}).items():
        if not _NAME.fullmatch(key):
            if not tool.strict:
                return None
            raise InvalidArgumentError(f"the model's format has no place for a parameter named {key!r}", field="tools")
        kinds = schema_types(_resolved(value, definitions))
        found.append(
            Argument(
                name=key,
                schema={**(value if isinstance(value, dict) else {}), **definitions},
                required=isinstance(required, list) and key in required,
                is_string=kinds == {"string"} if kinds else None,
                lenient=not tool.strict,
                field=tool.field,
            )
        )
    return found


def _resolved(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema at the end of a chain of references to the definitions."""
    for _ in range(_LONGEST_CHAIN):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        _, group, name = (*reference.split("/", 2), "", "")[:3]
        named = definitions.get(group)
        schema = named.get(name) if isinstance(named, dict) else None
    return None


def tagged(arguments: Sequence[Argument] | None, begin: Callable[[Argument], str], end: str) -> Format:
    """The arguments between tags, in their order; those that are not required may be missing."""
    if arguments is None:
        return ANYTHING
    parts = [_between(argument, begin(argument), end) for argument in arguments]
    wanted = [part if argument.required else optional(part) for argument, part in zip(arguments, parts, strict=True)]
    return sequence(*wanted) if wanted else text("")


def keywords(arguments: Sequence[Argument] | None, equals: str = "=", separator: str = ", ", quote: str = "") -> Format:
    """The arguments as ``a=1, b="x"``, required ones first.

    Args:
        arguments: The arguments.
        equals: Stands between a name and its value.
        separator: Stands between two arguments.
        quote: Stands around strings; "" if they are written in JSON, as all other values are.
    """
    if arguments is None:
        return ANYTHING

    def keyword(argument: Argument) -> Format:
        if quote and argument.is_string:
            return _between(argument, f"{argument.name}{equals}{quote}", quote)
        return tag(f"{argument.name}{equals}", json_value(argument.schema, argument.lenient, argument.field))

    parts = [keyword(argument) for argument in arguments if argument.required]
    rest = [keyword(argument) for argument in arguments if not argument.required]
    if parts:
        later = [optional(sequence(text(separator), part)) for part in rest]
        return sequence(parts[0], *(sequence(text(separator), part) for part in parts[1:]), *later)
    starts = [
        sequence(part, *(optional(sequence(text(separator), other)) for other in rest[index + 1 :]))
        for index, part in enumerate(rest)
    ]
    return either([*starts, text("")]) if starts else text("")


def _between(argument: Argument, begin: str, end: str) -> Format:
    schema = argument.schema
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return tag(begin, either([text(choice) for choice in choices]), end)
    if argument.is_string is False:
        return tag(begin, json_value(schema, argument.lenient, argument.field), end)
    return tag(begin, ANYTHING, end)
