"""The protocol of every parser of model output, and the one that runs a parsing generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sapwood_text.incremental.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from sapwood_text.incremental.source import Emit, Source, Steps

_TEXT = -1
_REASONING = -2


class Emitter:
    """Collects the events of one output.

    Args:
        make_id: Names a call by its index, for formats in which the model does not. None where no call can follow; then
            the text's white space is left alone.
    """

    def __init__(self, make_id: Callable[[int], str] | None) -> None:
        self._make_id = make_id
        self._trimmer = SpaceTrimmer(self._add_text, at_start=False)
        self._events: list[Event] = []
        self._channel = _TEXT
        self._pieces: list[str] = []
        self._calls = 0
        self._cut: set[int] = set()

    def drain(self) -> list[Event]:
        """The events since the last call of ``drain``, neighbours of a kind joined."""
        if self._pieces:
            self._join()
        events, self._events = self._events, []
        return events

    def text(self, piece: str) -> None:
        """More text. "" is no event."""
        if self._make_id is None:
            self._add_text(piece)
        else:
            self._trimmer(piece)

    def reasoning(self, piece: str) -> None:
        """More reasoning. "" is no event."""
        self._add(_REASONING, piece)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins; ``call_id`` is the model's own name for it, if it gave one."""
        assert self._make_id is not None, "this output has no calls"
        self._join()
        self._trimmer.cut()
        self._events.append(ToolCallStart(self._calls, name, call_id or self._make_id(self._calls)))
        self._calls += 1

    def arguments(self, fragment: str) -> None:
        """More of the arguments of the latest call. "" is no event."""
        channel = self._calls - 1
        assert channel >= 0, "no call has begun"
        if channel != self._channel:
            self._add(channel, fragment)
        elif fragment:
            self._pieces.append(fragment)

    def note_cut(self) -> None:
        """The latest call was cut off."""
        if self._calls:
            self._cut.add(self._calls)

    @property
    def whole_calls(self) -> int:
        """How many calls were not cut off."""
        return self._calls - len(self._cut)

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return self._calls

    def finish(self) -> None:
        """The output is over: release what is held back."""
        self._trimmer.release()

    def _add_text(self, piece: str) -> None:
        self._add(_TEXT, piece)

    def _add(self, channel: int, piece: str) -> None:
        if not piece:
            return
        if channel != self._channel:
            self._join()
            self._channel = channel
        self._pieces.append(piece)

    def _join(self) -> None:
        if not self._pieces:
            return
        joined = "".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        if self._channel == _TEXT:
            self._events.append(TextDelta(joined))
        elif self._channel == _REASONING:
            self._events.append(ReasoningDelta(joined))
        else:
            self._events.append(ToolCallArguments(self._channel, joined))


MAX_HELD_SPACE = 256
"""White space held back because it may be dropped, in characters. More than that is released from the front."""


class SpaceTrimmer:
    """Passes text on, but holds white space at its end back until more text comes.

    Texts on both sides of a cut are set apart by a line break.

    Args:
        emit: Takes the text.
        at_start: Drop white space until the first text.
    """

    def __init__(self, emit: Emit, *, at_start: bool) -> None:
        self._emit = emit
        self._at_start = at_start
        self._held = ""
        self._separator = ""
        self._empty = True

    def __call__(self, piece: str) -> None:
        """More text."""
        if self._at_start:
            piece = piece.lstrip()
            if not piece:
                return
            self._at_start = False
        body = piece.rstrip()
        if body:
            self._pass_on(self._held + body)
            self._held = ""
        self._held += piece[len(body) :]
        surplus = len(self._held) - MAX_HELD_SPACE
        if surplus > 0:
            self._pass_on(self._held[:surplus])
            self._held = self._held[surplus:]

    def cut(self) -> None:
        """Drop what is held back, and the white space that follows."""
        self._held = ""
        self._at_start = True
        self._separator = "" if self._empty else "\n"

    def release(self) -> None:
        """Pass on what is held back."""
        if self._held:
            self._pass_on(self._held)
            self._held = ""

    def _pass_on(self, piece: str) -> None:
        self._emit(self._separator + piece)
        self._separator = ""
        self._empty = False


Script = Callable[[Source, Emitter], Steps[None]]
"""Reads a whole output from the source and writes its events. Returns at the end of the text, never before."""


class Parser(Protocol):
    """Turns the text of one output, which arrives in pieces, into events.

    The events, put together, are the same however the text is cut. Nothing in the text makes a parser raise.
    """

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; return the events that are certain now. Not to be called after ``finish``."""

    def finish(self) -> list[Event]:
        """Return what was held back. Called once."""


class ScriptParser:
    """Implements :class:`Parser` with a generator.

    Args:
        script: Started at once; it waits for the first text.
        emitter: Where ``script`` writes; no other code uses it.
    """

    def __init__(self, script: Script, emitter: Emitter) -> None:
        self._source = Source()
        self._emitter = emitter
        self._steps = script(self._source, emitter)
        self._ended = False
        self._advance()

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if not self._source.pass_on(text):
            self._source.feed(text)
            self._advance()
            assert not self._ended, "a script ends with its text"
        return self._emitter.drain()

    def finish(self) -> list[Event]:
        self._source.close()
        self._advance()
        assert self._ended, "a script ends with its text"
        self._emitter.finish()
        return self._emitter.drain()

    def _advance(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._ended = True
