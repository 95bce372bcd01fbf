"""``tools`` and ``tool_choice`` of the Responses API, as the pipeline takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.responses.types import ResponsesRequest, Tool
from sapwood_router.request.structure import ToolChoice


def tools_of(request: ResponsesRequest) -> tuple[str, ToolChoice]:
    """The tools that the model is shown, as JSON, "" for none; and which calls there must be.

    Raises:
        InvalidArgumentError: A tool is no function with a name, or the choice is not understood, or names no tool on offer.
    """
    offered = [_function(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
    choice = request.tool_choice
    if choice in (None, "auto"):
        return _json(offered), ToolChoice()
    if choice == "none":
        return "", ToolChoice()
    if not offered:
        raise InvalidArgumentError("tool_choice is only allowed with tools", field="tool_choice")
    if choice == "required":
        return _json(offered), ToolChoice(required=True)
    names = {tool["function"]["name"] for tool in offered}
    match choice:
        case {"type": "function", "name": str() as name}:
            _check_offered([name], names, "tool_choice.name")
            return _json(offered), ToolChoice(required=True, name=name)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]} if allowed:
            wanted = [_name(tool) for tool in allowed]
            _check_offered(wanted, names, "tool_choice.tools")
            shown = [tool for tool in offered if tool["function"]["name"] in wanted]
            return _json(shown), ToolChoice(required=mode == "required")
    raise InvalidArgumentError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}',
        field="tool_choice",
    )


def _function(tool: Tool, path: str) -> dict[str, Any]:
    """A tool in the form of chats, as templates know them."""
    if tool.type != "function":
        raise InvalidArgumentError(f"tools of type {tool.type!r} are not supported", field=f"{path}.type")
    if not tool.name:
        raise InvalidArgumentError(f"{path}.name is required", field=f"{path}.name")
    said = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function = {"name": tool.name} | {name: value for name, value in said.items() if value is not None}
    return {"type": "function", "function": function}


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "name": str() as name}:
            return name
    raise InvalidArgumentError('it must be {"type": "function", "name": ...}', field="tool_choice.tools")


def _check_offered(wanted: Sequence[str], offered: set[str], field: str) -> None:
    for name in wanted:
        if name not in offered:
            raise InvalidArgumentError(f"there is no tool {name!r} among the tools", field=field)


def _json(tools: list[dict[str, Any]]) -> str:
    return msgspec.json.encode(tools).decode() if tools else ""
