"""The pieces of a generation's output, and the buffer that puts them together and drops what was taken.

Text, reasoning and the arguments of each call are channels of their own. After a loss the tokenizer sends all of them again
from the beginning, cut into other pieces; but each channel's text is the same, so counting its characters is enough to tell
what is new. Adding a piece takes time linear in its length, whatever was added before.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class OutputOptions(msgspec.Struct, frozen=True):
    """How tokens become output. Fields as in ``DetokenizeOptions`` of ``tokenizer.proto``.

    Attributes:
        stop: The output ends before the first of these.
        skip_special_tokens: Leave special tokens out of the text.
        tool_parser, reasoning_parser: Names of parsers; "" for none.
        reasoning_open: Whether the output begins inside reasoning; None is as usual for the parser.
        tools: The tools on offer, a JSON array.
        call_id_seed: What the ids of calls are made from: the same for each replay.
        include_stop: Whether what the output ended at, a stop string or an end token, is part of it.
        min_tokens: Tokens that no stop string ends the output within.
    """

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    tool_parser: str = ""
    reasoning_parser: str = ""
    reasoning_open: bool | None = None
    tools: str = ""
    call_id_seed: str = ""
    include_stop: bool = False
    min_tokens: int = 0


class ToolCallDelta(msgspec.Struct):
    """More of a tool call: ``index`` counts the calls of one output from 0, its first delta has its id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Output(msgspec.Struct):
    """A piece of an output: more of its text, of its reasoning and of its tool calls."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)


class _Channel:
    """One text that is sent in pieces, possibly from the beginning again."""

    __slots__ = ("_characters", "_pieces", "_skip")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._characters = 0
        self._skip = 0

    def add(self, text: str) -> bool:
        """Takes a piece; returns whether any of it is new."""
        if self._skip:
            dropped = min(self._skip, len(text))
            self._skip -= dropped
            text = text[dropped:]
        if not text:
            return False
        self._pieces.append(text)
        self._characters += len(text)
        return True

    def take(self) -> str:
        """What was added since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def rewind(self) -> None:
        """What was added so far comes again."""
        self._skip = self._characters


class OutputBuffer:
    """Pieces in, merged pieces out; after :meth:`rewind` only what goes beyond the pieces before it."""

    def __init__(self) -> None:
        self._text = _Channel()
        self._reasoning = _Channel()
        self._arguments: dict[int, _Channel] = {}
        """Index of a tool call -> its arguments. Calls that have not begun are not in it."""
        self._changed: dict[int, ToolCallDelta] = {}

    def add(self, piece: Output) -> bool:
        """Takes a piece; returns whether any of it is new."""
        fresh = self._text.add(piece.text)
        if piece.reasoning:
            fresh = self._reasoning.add(piece.reasoning) or fresh
        if piece.tool_calls:
            fresh = self._add_calls(piece.tool_calls) or fresh
        return fresh

    def take(self) -> Output:
        """Everything new since the last call, put together; calls by index."""
        calls: list[ToolCallDelta] = []
        if self._changed:
            calls = [self._changed[index] for index in sorted(self._changed)]
            self._changed.clear()
            for delta in calls:
                delta.arguments = self._arguments[delta.index].take()
        return Output(self._text.take(), self._reasoning.take(), calls)

    def rewind(self) -> None:
        """All pieces so far come again, cut in whatever way."""
        self._text.rewind()
        self._reasoning.rewind()
        for arguments in self._arguments.values():
            arguments.rewind()

    def _add_calls(self, deltas: Iterable[ToolCallDelta]) -> bool:
        fresh = False
        for delta in deltas:
            arguments = self._arguments.get(delta.index)
            if arguments is None:
                arguments = self._arguments[delta.index] = _Channel()
                self._changed[delta.index] = ToolCallDelta(delta.index, delta.id, delta.name)
                fresh = True
            if arguments.add(delta.arguments):
                self._changed.setdefault(delta.index, ToolCallDelta(delta.index))
                fresh = True
        return fresh
