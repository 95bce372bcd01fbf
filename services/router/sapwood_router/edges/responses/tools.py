"""``tools`` and ``tool_choice`` of the Responses API, as the pipeline takes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.openai.tools import leave_out_tool
from sapwood_router.edges.responses.types import ResponsesRequest, Tool
from sapwood_router.request.context import ToolChoice


def tools_of(request: ResponsesRequest, left_out: LeftOut) -> tuple[str, ToolChoice]:
    """The tools that the model is shown, as JSON, "" for none; and which calls there must be.

    ``left_out`` takes tools of kinds that nothing here runs.

    Raises:
        InvalidArgumentError: A function has no name, or the choice is not understood, or names no tool on offer.
    """
    offered: list[dict[str, Any]] = []
    for index, tool in enumerate(request.tools or ()):
        if tool.type == "function":
            offered.append(_function(tool, f"tools[{index}]"))
        else:
            leave_out_tool(left_out, index, tool.type)
    choice = request.tool_choice
    if choice in (None, "auto"):
        return _json(offered), ToolChoice()
    if choice == "none":
        return "", ToolChoice()
    if not request.tools:
        raise InvalidArgumentError("tool_choice is only allowed with tools", field="tool_choice")
    if not offered:  # all were left out
        return "", ToolChoice()
    if choice == "required":
        return _json(offered), ToolChoice(required=True)
    names = {tool["function"]["name"] for tool in offered}
    match choice:
        case {"type": "function", "name": str() as name}:
            _check_offered([name], names, "tool_choice.name")
            return _json(offered), ToolChoice(required=True, name=name)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]} if allowed:
            kinds = {tool.type for tool in request.tools}
            wanted = [_name(tool) for tool in allowed if not _is_left_out(tool, kinds)]
            _check_offered(wanted, names, "tool_choice.tools")
            shown = [tool for tool in offered if tool["function"]["name"] in wanted]
            return _json(shown), ToolChoice(required=mode == "required" and bool(shown))
        case {"type": str() as kind} if _is_left_out(choice, {tool.type for tool in request.tools}):
            left_out.value("tool_choice.type", kind, f"tools of type {kind!r} are not supported")
            return _json(offered), ToolChoice()
    raise InvalidArgumentError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}',
        field="tool_choice",
    )


def _function(tool: Tool, path: str) -> dict[str, Any]:
    """A tool in the form of chats, as templates know them."""
    if not tool.name:
        raise InvalidArgumentError(f"{path}.name is required", field=f"{path}.name")
    said = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function = {"name": tool.name} | {name: value for name, value in said.items() if value is not None}
    return {"type": "function", "function": function}


def _is_left_out(tool: Any, kinds: Collection[str]) -> bool:
    """Whether a choice is of a tool that was left out; ``kinds`` are those on offer."""
    return isinstance(tool, dict) and tool.get("type") != "function" and tool.get("type") in kinds


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
