"""``tools`` and ``tool_choice``, as the pipeline takes them."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.json_body import convert
from sapwood_router.edges.openai.types import ChatRequest, Tool
from sapwood_router.request.structure import ToolChoice


def tools_of(request: ChatRequest, given: Any) -> str:
    """The tools that the model may call, as JSON; "" where there are none or the client wants no call.

    Args:
        request: The checked request.
        given: Its ``tools`` as they came: the model's template is shown all of it, in the client's order.

    Raises:
        InvalidArgumentError: A tool is no function with a name.
    """
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            raise InvalidArgumentError(f"tools of type {tool.type!r} are not supported", field=f"tools[{index}].type")
        if tool.function is None:
            raise InvalidArgumentError("function is required", field=f"tools[{index}].function")
    if not request.tools or request.tool_choice == "none":
        return ""
    allowed = _allowed(request)
    if allowed is None:
        return msgspec.json.encode(given).decode()
    names = allowed.names
    offered = [tool for tool in given if tool["function"]["name"] in names]
    return msgspec.json.encode(offered).decode()


def tool_choice_of(request: ChatRequest) -> ToolChoice:
    """Which calls the client wants.

    Raises:
        InvalidArgumentError: The choice is not understood, or names no tool on offer.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return ToolChoice()
    if not request.tools:
        raise InvalidArgumentError("tool_choice is only allowed with tools", field="tool_choice")
    if choice == "required":
        return ToolChoice(required=True)
    allowed = _allowed(request)
    if allowed is not None:
        return ToolChoice(required=allowed.required)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
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
        return frozenset(tool.function.name for tool in self.allowed_tools.tools if tool.function is not None)

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


def _check_offered(request: ChatRequest, names: Set[str], field: str) -> None:
    offered = {tool.function.name for tool in request.tools or () if tool.function is not None}
    if missing := names - offered:
        raise InvalidArgumentError(f"there is no tool {min(missing)!r} among the tools", field=field)
