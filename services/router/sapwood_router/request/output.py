"""The pieces of a generation's output, and the buffer that puts them together."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sapwood_text.incremental.events import Event, ReasoningDelta, TextDelta, ToolCallStart


class OutputOptions(msgspec.Struct, frozen=True):
    """How tokens become output. Fields as in ``DetokenizeOptions`` of ``tokenizer.proto``.

    Attributes:
        stop: The output ends before the first of these.
        skip_special_tokens: Leave special tokens out of the text.
        tool_parser, reasoning_parser: Names of parsers; "" for none.
        reasoning_open: Whether the output begins inside reasoning; None is as usual for the parser.
        tools: The tools on offer, a JSON array.
        call_id_seed: What the ids of calls are made from.
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


class OutputBuffer:
    """Pieces in, merged pieces out."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[ToolCallDelta, list[str]]] = {}
        """Calls that have changed, by their index, with the pieces of their arguments."""

    def add(self, piece: Output) -> None:
        """Takes a piece."""
        self._text.append(piece.text)
        self._reasoning.append(piece.reasoning)
        for delta in piece.tool_calls:
            self._call(delta.index, delta.id, delta.name).append(delta.arguments)

    def add_events(self, events: Iterable[Event]) -> bool:
        """Takes what a parser found; returns whether there is any."""
        any_ = False
        for event in events:
            any_ = True
            if isinstance(event, TextDelta):
                self._text.append(event.text)
            elif isinstance(event, ReasoningDelta):
                self._reasoning.append(event.text)
            elif isinstance(event, ToolCallStart):
                self._call(event.index, event.id, event.name)
            else:
                self._call(event.index).append(event.fragment)
        return any_

    def take(self) -> Output:
        """Everything new since the last call, put together; calls by index."""
        calls: list[ToolCallDelta] = []
        if self._calls:
            for _, (delta, arguments) in sorted(self._calls.items()):
                delta.arguments = "".join(arguments)
                calls.append(delta)
            self._calls.clear()
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        self._text.clear()
        self._reasoning.clear()
        return Output(text, reasoning, calls)

    def _call(self, index: int, call_id: str = "", name: str = "") -> list[str]:
        """The pieces of a call's arguments."""
        changed = self._calls.get(index)
        if changed is None:
            changed = self._calls[index] = ToolCallDelta(index, call_id, name), []
        return changed[1]
