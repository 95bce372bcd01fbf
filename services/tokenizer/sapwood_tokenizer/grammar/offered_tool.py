"""A tool on offer, as far as the grammar of its calls needs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sapwood_common.errors import InvalidArgumentError
from sapwood_text.tool_parser.base import NAME_LIMIT
from sapwood_text.tool_parser.tools import Tools, load_tools
from sapwood_tokenizer.grammar.formats import Format, json_value

_NAME = re.compile(r"[\w.:/\-]+")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call.

    Attributes:
        name: Its name.
        schema: What its arguments, an object, must match; if the caller gives none, there are no arguments.
        strict: Whether the caller wants the schema enforced, or else an error.
        field: The schema's field, for errors.
    """

    name: str
    schema: dict[str, Any]
    strict: bool
    field: str = ""

    @property
    def arguments(self) -> Format:
        """The format of its arguments as JSON."""
        return json_value(self.schema, not self.strict, self.field)


def offered_tools(text: str) -> list[OfferedTool]:
    """Reads a JSON array in the form of OpenAI's ``tools``.

    Raises:
        InvalidArgumentError: It is not such an array. The field is "tools[i]...".
    """
    objects = load_tools(text)
    Tools.from_objects(objects)  # raises for every other fault
    return [_offered(item.get("function", item), index) for index, item in enumerate(objects)]


def named(tools: Sequence[OfferedTool], name: str) -> list[OfferedTool]:
    """The tools called ``name``.

    Raises:
        InvalidArgumentError: There is none. The field is "name".
    """
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise InvalidArgumentError(f"there is no tool {name!r} among the tools", field="name")
    return found[:1]


def _offered(function: dict[str, Any], index: int) -> OfferedTool:
    field = f"tools[{index}].function"
    name, schema, strict = function["name"], function.get("parameters"), function.get("strict") is True
    if len(name) > NAME_LIMIT or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"the name of a tool that is to be called by a grammar has at most {NAME_LIMIT} letters, digits and ._:/-",
            field=f"{field}.name",
        )
    if schema is None:
        schema = NO_PARAMETERS
    if not isinstance(schema, dict):
        raise InvalidArgumentError("a tool's parameters are a JSON schema", field=f"{field}.parameters")
    return OfferedTool(name, {"type": "object", **schema}, strict, f"tool_calls.{field}.parameters")
