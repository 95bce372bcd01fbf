"""Anthropic's messages and tools as the tokenizer takes a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.steps import Steps
from sapwood_router.edges.anthropic.types import Block, CountRequest, Message, Tool
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.request.arguments import arguments_text
from sapwood_router.request.context import ChatPrompt, PictureSource, ToolCall, ToolChoice, Turn, picture_file

BETWEEN_TEXTS = "\n"
"""Stands between a message's blocks of text, and between messages of a user's that follow each other: they are one turn."""


def prompt_of(request: CountRequest, left_out: LeftOut) -> Steps[tuple[ChatPrompt, tuple[str, ...]]]:
    """The conversation, and how the client calls each of its turns.

    A last message of the assistant's is gone on with. ``left_out`` takes calls of tools that nothing here runs, and their
    results.

    Raises:
        InvalidArgumentError: The input has a field that is not understood.
    """
    turns = _Turns(left_out)
    if request.system:
        turns.add("system", Turn("system", _text(request.system, "system")))
    for index, message in enumerate(request.messages):
        yield from turns.take(message, f"messages[{index}]")
    turns.close()
    last = turns.made[-1] if turns.made else None
    goes_on = last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls
    tools = (
        ""
        if request.tool_choice is not None and request.tool_choice.type == "none"
        else _tools(request.tools, left_out)
    )
    prompt = ChatPrompt(tuple(turns.made), tools, _template_variables(request), continue_final_message=goes_on)
    return prompt, tuple(turns.paths)


def tool_choice_of(request: CountRequest) -> tuple[ToolChoice, bool]:
    """Which calls there must be, and whether there may be several.

    Raises:
        InvalidArgumentError: It asks for a tool that is not on offer.
    """
    choice = request.tool_choice
    if choice is None:
        return ToolChoice(), True
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("auto", "none"):
        return ToolChoice(), parallel
    if not request.tools:
        raise InvalidArgumentError("tool_choice is only allowed with tools", field="tool_choice")
    offered = {tool.name for tool in request.tools if _is_own(tool)}
    if not offered:  # all were left out
        return ToolChoice(), parallel
    if choice.type == "any":
        return ToolChoice(required=True), parallel
    if not choice.name:
        raise InvalidArgumentError("name is required", field="tool_choice.name")
    if choice.name not in offered:
        if any(tool.name == choice.name for tool in request.tools):
            return ToolChoice(), parallel
        raise InvalidArgumentError(f"there is no tool {choice.name!r} among the tools", field="tool_choice.name")
    return ToolChoice(required=True, name=choice.name), parallel


class _Turns:
    """The turns so far; a message may be several, and several may be one."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out
        self.made: list[Turn] = []
        self.paths: list[str] = []
        self._tool_names: dict[str, str] = {}
        self._said: list[str | PictureSource] = []
        """What the user says and shows in the last turn, while the turn may still grow."""

    def add(self, path: str, turn: Turn) -> None:
        """One more."""
        self.close()
        self.made.append(turn)
        self.paths.append(path)

    def close(self) -> None:
        """The last turn does not go on: its texts, which may be thousands, are put together."""
        if len(self._said) > 1 or (self._said and isinstance(self._said[0], PictureSource)):
            self.made[-1] = _shown("user", self._said)
        self._said = []

    def take(self, message: Message, path: str) -> Steps[None]:
        """What a message says."""
        yield
        if message.role == "assistant":
            yield from self._take_assistant(message, path)
        elif message.role == "system":
            self.add(path, Turn("system", _text(message.content, f"{path}.content")))
        elif isinstance(message.content, str):
            self._take_part(message.content, path)
        else:
            for index, block in enumerate(message.content):
                where = f"{path}.content[{index}]"
                if block.type == "tool_result":
                    self._take_result(block, where)
                elif _is_foreign(block.type):
                    self._leave_out(block.type, where)
                else:
                    self._take_part(_part_of(block, where), path)
                yield

    def _leave_out(self, kind: str, where: str) -> None:
        self._left_out.value(f"{where}.type", kind, f"content of type {kind!r} is not supported")

    def _take_part(self, part: str | PictureSource, path: str) -> None:
        if not self._said:
            self.add(path, Turn("user", part if isinstance(part, str) else ""))
        self._said.append(part)

    def _take_result(self, block: Block, where: str) -> None:
        if not block.tool_use_id:
            raise InvalidArgumentError(
                "tool_use_id is required: the call that this answers", field=f"{where}.tool_use_id"
            )
        content, field = block.content or "", f"{where}.content"
        parts = (
            [content]
            if isinstance(content, str)
            else [_part_of(each, f"{field}[{index}]") for index, each in enumerate(content)]
        )
        name = self._tool_names.get(block.tool_use_id)
        turn = _shown("tool", parts)
        self.add(where, msgspec.structs.replace(turn, name=name, tool_call_id=block.tool_use_id))

    def _take_assistant(self, message: Message, path: str) -> Steps[None]:
        if isinstance(message.content, str):
            self.add(path, Turn("assistant", message.content))
            return
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(message.content):
            where = f"{path}.content[{index}]"
            if block.type == "tool_use":
                calls.append(self._call(block, where))
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif _is_foreign(block.type):
                self._leave_out(block.type, where)
            elif block.type != "redacted_thinking":  # of another server's model: nobody can read it
                texts.append(_text_of(block, where))
            yield
        content = BETWEEN_TEXTS.join(texts) if texts else None
        reasoning = BETWEEN_TEXTS.join(thoughts) or None
        self.add(path, Turn("assistant", content, tool_calls=tuple(calls), reasoning=reasoning))

    def _call(self, block: Block, where: str) -> ToolCall:
        for name, value in (("id", block.id), ("name", block.name)):
            if not value:
                raise InvalidArgumentError(f"{name} is required", field=f"{where}.{name}")
        assert block.id is not None and block.name is not None
        self._tool_names[block.id] = block.name
        return ToolCall(block.id, block.name, arguments_text(block.input))


def _is_foreign(kind: str) -> bool:
    """Whether a block is a call of a tool that Anthropic runs, or such a call's result."""
    return kind in ("server_tool_use", "mcp_tool_use") or (kind.endswith("_tool_result") and kind != "tool_result")


def _is_own(tool: Tool) -> bool:
    """Whether a tool is described by the client. Models of Anthropic's know the others, and their servers run some."""
    return tool.type in (None, "custom")


def _text(content: str | list[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    return BETWEEN_TEXTS.join(_text_of(block, f"{path}[{index}]") for index, block in enumerate(content))


def _shown(role: str, parts: Sequence[str | PictureSource]) -> Turn:
    """A turn of texts and pictures."""
    texts = [part for part in parts if isinstance(part, str)]
    return Turn(role, BETWEEN_TEXTS.join(texts), items=tuple(parts) if len(texts) < len(parts) else ())


def _part_of(block: Block, where: str) -> str | PictureSource:
    """A text or a picture."""
    if block.type != "image":
        return _text_of(block, where)
    source, field = block.source, f"{where}.source"
    if source is None or source.type not in ("base64", "url"):
        kind = None if source is None else source.type
        raise InvalidArgumentError(f"a picture's source is base64 or url, not {kind!r}", field=field)
    if source.type == "url":
        if source.url is None:
            raise InvalidArgumentError("url is required", field=f"{field}.url")
        return PictureSource(source.url)
    if source.data is None:
        raise InvalidArgumentError("data is required", field=f"{field}.data")
    return picture_file(source.data, f"{field}.data")


def _text_of(block: Block, where: str) -> str:
    if block.type != "text":
        raise InvalidArgumentError(
            f"content of type {block.type!r} is not supported; here it can be text", field=f"{where}.type"
        )
    if block.text is None:
        raise InvalidArgumentError("text is required", field=f"{where}.text")
    return block.text


def _tools(tools: list[Tool] | None, left_out: LeftOut) -> str:
    """The tools in the form of OpenAI's API, as templates know them."""
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        if not _is_own(tool):
            kind = str(tool.type)
            left_out.value(f"tools[{index}].type", kind, f"tools of type {kind!r} are not supported")
            continue
        if tool.name is None:
            raise InvalidArgumentError(f"tools[{index}].name is required", field=f"tools[{index}].name")
        if tool.input_schema is None:
            raise InvalidArgumentError("input_schema is required", field=f"tools[{index}].input_schema")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        made.append({"type": "function", "function": function})
    return msgspec.json.encode(made).decode() if made else ""


def _template_variables(request: CountRequest) -> str:
    """``thinking`` and ``effort`` as template variables, under the names that templates of reasoning models know."""
    variables: dict[str, Any] = {}
    if request.enable_thinking is not None:
        variables = {"enable_thinking": request.enable_thinking, "thinking": request.enable_thinking}
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        variables = {"enable_thinking": thinks, "thinking": thinks}
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    variables |= request.chat_template_kwargs or {}
    return msgspec.json.encode(variables).decode() if variables else ""
