"""The writing side of a parser: collects events, joins neighbours and trims the white space around tool calls.

White space between a call and the text next to it belongs to the format and is dropped: what stands before a call (the
last ``MAX_HELD_SPACE`` characters of it), between two calls, and after the last one up to the next text. Texts before and
after calls are set apart by a line break. All other text goes through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from sapwood_text.incremental.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from sapwood_text.incremental.space_trimmer import SpaceTrimmer

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
