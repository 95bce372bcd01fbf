"""``tools`` and ``tool_choice``, as the pipeline takes them."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.json_body import convert
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.openai.types import ChatRequest, Tool
from sapwood_router.request.context import ToolChoice

_MOST_NAMED = 8
"""Tools that an error names."""


def tools_of(request: ChatRequest, given: Any, left_out: LeftOut) -> str:
    """The tools that the model may call, as JSON; "" where there are none or the client wants no call.

    Args:
        request: The checked request.
        given: Its ``tools`` as they came: the model's template is shown all of it, in the client's order.
        left_out: Takes tools of kinds that nothing here runs.

    Raises:
        InvalidArgumentError: A function has no name.
    """
    tools = request.tools or ()
    for index, tool in enumerate(tools):
        if tool.type != "function":
            leave_out_tool(left_out, index, tool.type)
        elif tool.function is None:
            raise InvalidArgumentError("function is required", field=f"tools[{index}].function")
    if not tools:
        return ""
    names, allowed = _offered(request), _allowed(request)
    if allowed is not None:
        names &= allowed.names
    if not names or request.tool_choice == "none":
        return ""
    offered = [each for each, tool in zip(given, tools, strict=True) if _name(tool) in names]
    return msgspec.json.encode(offered).decode()


def leave_out_tool(left_out: LeftOut, index: int, kind: str) -> None:
    """Leaves out a tool that some server runs, and nothing here.

    Raises:
        InvalidArgumentError: Such requests are refused.
    """
    field = f"tools[{index}].type"
    left_out.value(field, kind, f"tools of type {kind!r} are not supported")


def tool_choice_of(request: ChatRequest, left_out: LeftOut) -> ToolChoice:
    """Which calls the client wants.

    Raises:
        InvalidArgumentError: The choice is not understood, or names no tool on offer.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return ToolChoice()
    if not request.tools:
        raise InvalidArgumentError("tool_choice is only allowed with tools", field="tool_choice")
    if not _offered(request):  # all were left out
        return ToolChoice()
    if choice == "required":
        return ToolChoice(required=True)
    allowed = _allowed(request)
    if allowed is not None:
        return ToolChoice(required=allowed.required and bool(allowed.names))
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind != "function" and any(tool.type == kind for tool in request.tools):
        left_out.value("tool_choice.type", kind, f"tools of type {kind!r} are not supported")
        return ToolChoice()
    function = choice.get("function") if kind == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidArgumentError(
            'tool_choice must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}',
            field="tool_choice",
        )
    _check_offered(request, {name}, "tool_choice.function.name")
    return ToolChoice(required=True, name=name)


class _Tools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Meta(min_length=1)]


class _AllowedTools(msgspec.Struct):
    """OpenAI's choice of some of the tools."""

    allowed_tools: _Tools

    @property
    def names(self) -> frozenset[str]:
        """The functions among them."""
        return frozenset(name for tool in self.allowed_tools.tools if (name := _name(tool)) is not None)

    @property
    def required(self) -> bool:
        return self.allowed_tools.mode == "required"


def _allowed(request: ChatRequest) -> _AllowedTools | None:
    """The choice of some of the tools, if it is one; the others are not shown to the model."""
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    allowed = convert(choice, _AllowedTools, {"type": ("allowed_tools",)}, prefix="tool_choice.")
    _check_offered(request, allowed.names, "tool_choice.allowed_tools.tools")
    return allowed


def _name(tool: Tool) -> str | None:
    """The name of a function; None for a tool of another kind."""
    return tool.function.name if tool.type == "function" and tool.function is not None else None


def _offered(request: ChatRequest) -> frozenset[str]:
    """The names of the functions on offer."""
    return frozenset(name for tool in request.tools or () if (name := _name(tool)) is not None)


def _check_offered(request: ChatRequest, names: Set[str], field: str) -> None:
    if missing := names - _offered(request):
        some = ", ".join(sorted(_offered(request))[:_MOST_NAMED])
        there = f"; there are {some}" if some else ""
        raise InvalidArgumentError(f"there is no tool {min(missing)!r} among the tools{there}", field=field)
