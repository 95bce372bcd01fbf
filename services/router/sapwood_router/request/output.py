"""The pieces of a generation's output, and the buffer that puts them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sapwood_common.errors import SapwoodError
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


class Output(msgspec.Struct, gc=False):
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


WINDOW = 256
"""Tokens that may wait for the client, or for the tokenizer, before the worker's stream is read no further."""


class OutputChunk(msgspec.Struct, gc=False):
    """Output that became certain.

    Attributes:
        output: What is new.
        tokens: How many of the stream's tokens were read for all output so far.
        ended: Nothing follows.
        stop_match: The stop string that ended the stream.
        reasoning_tokens: How many of the tokens are reasoning.
    """

    output: Output
    tokens: int
    ended: bool
    stop_match: str | None = None
    reasoning_tokens: int = 0


class OutputStream(ABC):
    """A request's output on its way to the client, all on one event loop: the worker's side pushes tokens, the request takes what
    becomes of them. What is taken late is taken merged, so a stream holds at most the output of its own tokens; the pusher keeps
    those within WINDOW.

    Args:
        whole: The output is taken in one piece, at its end: nothing holds the pusher back.

    Attributes:
        over: Whether it ended, failed or was closed: what is pushed now goes nowhere.
        ready: Whether :meth:`take` has something to give, or to raise.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.over = False
        self.ready = False
        self._whole = whole
        self._tokens = 0
        """How many tokens the output so far stands for."""
        self._tokens_taken = 0
        self._fresh = False
        """Whether there is output that has not been taken."""
        self._ended = False
        self._error: SapwoodError | None = None
        self._listener: Callable[[], None] | None = None
        self._when_room: Callable[[], None] | None = None

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be pushed for now."""
        return not (self._whole or self.over) and self._waiting_tokens() >= WINDOW

    @abstractmethod
    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        """Hands over new tokens; ``end`` says that these were the last. Returns whether it is :attr:`full` now."""

    @abstractmethod
    def _waiting_tokens(self) -> int:
        """How many wait to be written, or for their output to be taken: the larger of both."""

    @abstractmethod
    def _chunk(self) -> OutputChunk:
        """What became certain since the last call."""

    def call_when_room(self, callback: Callable[[], None]) -> None:
        """Calls back, once, when it is no longer :attr:`full`; only while it is. A later callback replaces an earlier one."""
        self._when_room = callback

    def follow(self, listener: Callable[[], None]) -> None:
        """Calls ``listener``, which must not raise, whenever it becomes :attr:`ready` or has more."""
        self._listener = listener

    def take(self) -> OutputChunk:
        """All that became certain since the last call; only while :attr:`ready`.

        Raises:
            SapwoodError: The stream failed; what came before was taken, unless it is taken whole.
        """
        if self._error is not None and (self._whole or not self._fresh):
            raise self._error
        chunk = self._chunk()
        self._fresh = False
        self.ready = self.over
        self._tokens_taken = self._tokens
        if self._when_room is not None:
            self._tell_pusher()
        return chunk

    def fail(self, error: SapwoodError) -> None:
        """:meth:`take` raises ``error`` after what is there already; the first error counts."""
        if not self.over:
            self._error = error
            self._end()

    def close(self) -> None:
        """Nobody takes any more. May be called again."""
        self.over, self.ready, self._error = True, False, None
        self._listener = None
        self._tell_pusher()

    def _more(self, *, end: bool) -> None:
        """There is new output; ``end``: it is the last."""
        self._fresh = True
        if end:
            self._ended = True
            self._end()
        elif not self._whole:
            self.ready = True
            if self._listener is not None:
                self._listener()

    def _end(self) -> None:
        self.over = self.ready = True
        if self._listener is not None:
            self._listener()
        self._tell_pusher()

    def _tell_pusher(self) -> None:
        if self._when_room is not None and not self.full:
            callback, self._when_room = self._when_room, None
            callback()


class TokenStream(OutputStream):
    """Tokens on their way to a client that wants token ids: they are only counted, for their ids are in the request's context."""

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        if self.over:
            return False
        self._tokens += len(token_ids)
        if end or token_ids:
            self._more(end=end)
        return self._tokens - self._tokens_taken >= WINDOW and self.full

    def _waiting_tokens(self) -> int:
        return self._tokens - self._tokens_taken

    def _chunk(self) -> OutputChunk:
        return OutputChunk(Output(), self._tokens, self._ended)
