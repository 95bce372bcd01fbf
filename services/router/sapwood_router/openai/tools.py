"""``tools`` and ``tool_choice``, as the pipeline takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.openai.types import ChatRequest


def tools_of(request: ChatRequest, given: Any) -> str:
    """The tools that the model may call, as JSON; "" where there are none or the client wants no call.

    Args:
        request: The checked request.
        given: Its ``tools`` as they came: the model's template is shown all of it, in the client's order.

    Raises:
        InvalidArgumentError: A tool is no function with a name, or the choice would force a call.
    """
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            raise InvalidArgumentError(f"tools of type {tool.type!r} are not supported", field=f"tools[{index}].type")
        if tool.function is None:
            raise InvalidArgumentError("function is required", field=f"tools[{index}].function")
    if request.tool_choice not in (None, "auto", "none"):
        raise InvalidArgumentError(
            'only the tool choices "auto" and "none" are supported: none that forces a call', field="tool_choice"
        )
    if not request.tools or request.tool_choice == "none":
        return ""
    return msgspec.json.encode(given).decode()
