"""``tools`` and ``tool_choice``, as the pipeline takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.openai.types import ChatRequest
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
    return msgspec.json.encode(given).decode()


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
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidArgumentError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
            field="tool_choice",
        )
    if not any(tool.function is not None and tool.function.name == name for tool in request.tools):
        raise InvalidArgumentError(f"there is no tool {name!r} among the tools", field="tool_choice.function.name")
    return ToolChoice(required=True, name=name)
