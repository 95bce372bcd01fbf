"""Conversations and variables, as requests have them, in the form that chat templates expect.

Render processes import it, so it imports little.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sapwood.v1 import common_pb2
from sapwood_common.errors import InvalidArgumentError

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that templates have for what the assistant reasoned."""


class CallArguments(dict[str, Any]):
    """The arguments of a call, for chat templates.

    Most templates treat them as a mapping; some put them into the prompt as text, which is the JSON as it came.

    Args:
        text: A JSON object.

    Raises:
        ValueError: The text is not a JSON object.
    """

    def __init__(self, text: str) -> None:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text


def to_messages(messages: Sequence[common_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """A conversation in the form that chat templates expect, which is that of OpenAI's API.

    A message without content gets None if it has tool calls, else "". Content of several texts is their list,
    and content with pictures a list of parts. Reasoning gets all
    names that templates use.

    Raises:
        InvalidArgumentError: The arguments of a call are not a JSON object. The field is
            "messages[i].tool_calls[j].arguments".
    """
    return [_to_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _to_message(message: common_pb2.ChatMessage, field: str) -> dict[str, Any]:
    has_content = message.HasField("content") or not message.tool_calls
    content: Any = message.content if has_content else None
    if message.items:
        content = [_to_part(item) for item in message.items]
    elif len(message.parts) > 1:
        content = [*message.parts]
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.HasField("name"):
        turn["name"] = message.name
    if message.HasField("tool_call_id"):
        turn["tool_call_id"] = message.tool_call_id
    if message.HasField("reasoning"):
        turn |= dict.fromkeys(_REASONING, message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [
            _to_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return turn


def _to_part(item: common_pb2.ContentPart) -> dict[str, str]:
    """A part as templates know it: of a picture only that there is one."""
    if item.HasField("picture"):
        return {"type": "video" if item.picture.video else "image"}
    return {"type": "text", "text": item.text}


def _to_call(call: common_pb2.ToolCall, field: str) -> dict[str, Any]:
    try:
        arguments = CallArguments(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the arguments of a call are a JSON object: {error}", field=f"{field}.arguments"
        ) from None
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def to_variables(text: str) -> dict[str, Any]:
    """Variables for a chat template, from a JSON object; "" is none.

    Raises:
        InvalidArgumentError: It is not a JSON object. The field is "template_variables".
    """
    try:
        variables = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"template_variables is not JSON: {error}", field="template_variables") from None
    if not isinstance(variables, dict):
        raise InvalidArgumentError("template_variables is a JSON object", field="template_variables")
    return variables
