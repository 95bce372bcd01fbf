"""Items of an input as turns of a conversation, and an output as items."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.steps import Steps
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.openai.tools import leave_out_tool
from sapwood_router.edges.responses.types import Item, Part, ResponsesRequest, Tool
from sapwood_router.request.arguments import arguments_text
from sapwood_router.request.context import PictureSource, ToolCall, ToolChoice, Turn
from sapwood_router.request.output import Output
from sapwood_router.request.validation import check_arguments

BETWEEN_TEXTS = "\n"
"""Stands between several messages of the assistant's that are one turn, and between instructions and a first such message."""
_INDEX = 4
"""Digits of an item's index in its id."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ASIDE = ("additional_tools", "compaction_trigger", "configuration")
"""Kinds of items that say nothing to the model."""
_OF_SERVERS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
"""Kinds of items about MCP servers that the model does not read: it sees the tools, and the calls that were made."""
COMPACTED = ("compaction", "compaction_summary")
"""Kinds of items that stand for a conversation."""
SUMMARY = "The conversation so far, in short:"
"""Stands before such an item, for the model."""
_MARK = "sapwood:"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Conversation:
    """The turns that items are: what the assistant reasoned, said and called is one turn.

    Attributes:
        paths: How the client calls each turn.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._joins_users = False
        """Whether what the user says goes on, too: a summary stands among it."""
        self._turns: list[list[Turn]] = []
        """Texts that are joined only when they are needed: one turn may be thousands of items."""

    @property
    def turns(self) -> list[Turn]:
        """The turns so far."""
        return [_merged(parts) for parts in self._turns]

    def add(self, path: str, turn: Turn) -> None:
        """One more; what the assistant says goes on with what it said before, and so does what the system says at the start."""
        merges = turn.role == "assistant" or (turn.role == "system" and len(self._turns) == 1)
        merges = merges or (turn.role == "user" and self._joins_users)
        if merges and self._turns and self._turns[-1][0].role == turn.role:
            self._turns[-1].append(turn)
        else:
            self._turns.append([turn])
            self.paths.append(path)

    def take(
        self, given: str | Sequence[Item], found: Mapping[str, Item], left_out: LeftOut, field: str = "input"
    ) -> Steps[None]:
        """The input of a request, an item a step.

        Args:
            given: The input.
            found: The items of earlier answers to which the input refers, by id.
            left_out: Takes calls of tools that nothing here runs, and their results.
            field: The client's name of the input.

        Raises:
            InvalidArgumentError: The input has a field that is not understood.
            NotFoundError: The input refers to an item that is not kept.
        """
        if isinstance(given, str):
            self.add(field, Turn("user", given))
            return
        self._joins_users = self._joins_users or any(item.type in COMPACTED for item in given)
        for index, item in enumerate(given):
            path = f"{field}[{index}]"
            if item.type == "item_reference":
                item = found[_needed(item.id, f"{path}.id")]
            if item.type in COMPACTED:
                if (summary := summary_in(item.encrypted_content)) is not None:
                    self.add(path, Turn("user", f"{SUMMARY}\n{summary}"))
                else:  # another server's
                    left_out.value(f"{path}.type", item.type, f"{path} was compacted elsewhere")
            elif item.type == "mcp_call" and item.server_label and item.name:
                call = ToolCall(item.id or path, f"{item.server_label}:{item.name}", _arguments(item, path))
                self.add(path, Turn("assistant", None, tool_calls=(call,)))
                result = item.output if isinstance(item.output, str) else f"The call failed: {item.error}"
                self.add(path, Turn("tool", result, tool_call_id=call.id))
            elif item.type in _OF_SERVERS:
                pass
            elif _is_foreign(item.type):
                left_out.value(f"{path}.type", item.type, f"items of type {item.type!r} are not supported")
            else:
                self.add(path, _turn(item, path))
            yield


def _merged(parts: Sequence[Turn]) -> Turn:
    if len(parts) == 1:
        return parts[0]
    return Turn(
        parts[0].role,
        _joined(part.content for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        reasoning=_joined(part.reasoning for part in parts),
        items=tuple(item for part in parts for item in part.items or (() if part.content is None else (part.content,)))
        if any(part.items for part in parts)
        else (),
    )


def _joined(texts: Iterable[str | None]) -> str | None:
    some = [text for text in texts if text is not None]
    return BETWEEN_TEXTS.join(some) if some else None


def _turn(item: Item, path: str) -> Turn:
    match item.type:
        case "message":
            role = _ROLES.get(item.role or "")
            if role is None:
                raise InvalidArgumentError(
                    f"role {item.role!r} is not supported; there are user, assistant, system and developer",
                    field=f"{path}.role",
                )
            return _shown(role, item.content, f"{path}.content", path)
        case "reasoning":  # what another server has encrypted nobody can read
            return Turn("assistant", None, reasoning=_text(item.content or "", f"{path}.content") or None)
        case "function_call":
            call_id, name = _needed(item.call_id, f"{path}.call_id"), _needed(item.name, f"{path}.name")
            return Turn("assistant", None, tool_calls=(ToolCall(call_id, name, _arguments(item, path)),))
        case "function_call_output":
            call_id = _needed(item.call_id, f"{path}.call_id")
            turn = _shown("tool", item.output, f"{path}.output", path)
            return replace(turn, tool_call_id=call_id)
        case other:
            raise InvalidArgumentError(
                f"items of type {other!r} are not supported; there are message, reasoning, function_call and "
                "function_call_output",
                field=f"{path}.type",
            )


def _is_foreign(kind: str) -> bool:
    """Whether an item is a call of a tool that nothing here runs, or its result, or a list of such tools."""
    if kind in ("function_call", "function_call_output"):
        return False
    return (
        kind.endswith(("_call", "_call_output", "_output"))
        or kind.startswith(("mcp_", "tool_search"))
        or kind in _ASIDE
    )


def packed(summary: str) -> str:
    """A summary as an item has it. It is not secret: clients only hand it back."""
    return _MARK + base64.b64encode(summary.encode()).decode()


def summary_in(content: str | None) -> str | None:
    """The summary in an item; None: it is not from here."""
    try:
        return (
            base64.b64decode((content or "").removeprefix(_MARK), validate=True).decode()
            if (content or "").startswith(_MARK)
            else None
        )
    except ValueError:
        return None


def input_items(given: Any, secret: str) -> list[dict[str, Any]]:
    """The input of a request as a list of items, each with an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        made = {"type": "message", **item}
        made["id"] = item.get("id") or f"msg_{secret}i{index:x}"
        if made["type"] == "message":
            kind = "output_text" if made.get("role") == "assistant" else "input_text"
            if isinstance(made.get("content"), str):
                made["content"] = [{"type": kind, "text": made["content"]}]
            made.setdefault("status", "completed")
        items.append(made)
    return items


def _needed(value: str | None, path: str) -> str:
    if not value:
        raise InvalidArgumentError(f"{path} is required", field=path)
    return value


def _arguments(item: Item, path: str) -> str:
    text = arguments_text(item.arguments)
    check_arguments(text, f"{path}.arguments")
    return text


def _shown(role: str, content: str | list[Part] | None, field: str, path: str) -> Turn:
    """What somebody says, with the pictures that he shows."""
    if not isinstance(content, list) or all(part.type != "input_image" for part in content):
        return Turn(role, _text(content, field))
    if role not in ("user", "tool"):
        raise InvalidArgumentError(f"a picture is not supported in a message of role {role!r}", field=f"{path}.role")
    items: list[str | PictureSource] = []
    for index, part in enumerate(content):
        if part.type != "input_image":
            items.append(_text([part], f"{field}[{index}]"))
        elif part.image_url is None:  # a file that was sent before
            raise InvalidArgumentError("image_url is required", field=f"{field}[{index}].image_url")
        else:
            items.append(PictureSource(part.image_url, part.detail or ""))
    return Turn(role, BETWEEN_TEXTS.join(item for item in items if isinstance(item, str)), items=tuple(items))


def _text(content: str | list[Part] | None, path: str) -> str:
    if content is None:
        raise InvalidArgumentError(f"{path} is required", field=path)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type != "refusal" and part.type not in _TEXTS:
            raise InvalidArgumentError(f"content of type {part.type!r} is not supported", field=f"{path}[{index}].type")
        if text is None:
            raise InvalidArgumentError("text is required", field=f"{path}[{index}].text")
        texts.append(text)
    return BETWEEN_TEXTS.join(texts)


def turn_of(output: Output) -> Turn:
    """An answer as the turn that a later request continues."""
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in output.tool_calls)
    return Turn("assistant", output.text or None, tool_calls=calls, reasoning=output.reasoning or None)


class ItemMaker:
    """Makes the items of one answer; their ids are made of the answer's.

    Args:
        secret: What only the answer has in its id.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def reasoning(self, index: int, text: str | None, status: str) -> dict[str, Any]:
        """The item with this index; a text of None is not sent yet."""
        content = [] if text is None else [reasoning_part(text)]
        return {"id": self._id("rs", index), "type": "reasoning", "summary": [], "content": content, "status": status}

    def message(self, index: int, text: str | None, status: str, logprobs: object = ()) -> dict[str, Any]:
        """The item with this index; of a text that is None there is no part yet, and nothing of its tokens."""
        content = [] if text is None else [text_part(text, logprobs)]
        made = {"id": self._id("msg", index), "type": "message", "role": "assistant"}
        return {**made, "content": content, "status": status}

    def call(self, index: int, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
        """The item with this index, which is a call of a function."""
        made = {"id": self._id("fc", index), "type": "function_call", "call_id": call_id, "name": name}
        return {**made, "arguments": arguments, "status": status}

    def of_kind(self, prefix: str, index: int, kind: str, **fields: Any) -> dict[str, Any]:
        """The item with this index, of any kind; its id begins with ``prefix``."""
        return {"id": self._id(prefix, index), "type": kind, **fields}

    def _id(self, kind: str, index: int) -> str:
        return f"{kind}_{self._secret}{index:0{_INDEX}x}"


def response_of(item_id: str) -> tuple[str, int]:
    """The id of the response that an item is of, and its index there, as :class:`ItemMaker` makes them; "" and 0 of others."""
    secret = item_id.rpartition("_")[2]
    try:
        return f"resp_{secret[:-_INDEX]}", int(secret[-_INDEX:], 16)
    except ValueError:
        return "", 0


def text_part(text: str, logprobs: object = ()) -> dict[str, Any]:
    """A part of a message, with its tokens if they are reported."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_part(text: str) -> dict[str, Any]:
    """A part of reasoning."""
    return {"type": "reasoning_text", "text": text}


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
            wanted = {_name(tool): None for tool in allowed if not _is_left_out(tool, kinds)}
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


def _check_offered(wanted: Iterable[str], offered: set[str], field: str) -> None:
    for name in wanted:
        if name not in offered:
            raise InvalidArgumentError(f"there is no tool {name!r} among the tools", field=field)


def _json(tools: list[dict[str, Any]]) -> str:
    return msgspec.json.encode(tools).decode() if tools else ""
