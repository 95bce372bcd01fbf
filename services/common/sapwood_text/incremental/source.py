"""The reading side of a parser: a text that arrives in pieces, read by generators that wait for more.

A parser is written as if the whole text were there: ``tag = yield from source.accept("<a>", "<b>")``. Where the text
so far does not decide the answer, the primitive yields, and continues when more text has come or the text has ended.
What a primitive returns depends only on the text from where it was called, never on how the text was cut. So it is with
parsers made of primitives; only the size of the pieces handed to ``emit`` depends on the cuts.

Text is consumed as soon as it is read. So the memory between two pieces is bounded by the longest string that a primitive looks
for, and the time for a whole text is linear in its length. A parser that is not yet sure keeps what it reads in a
record (``start_recording``), to give it back as text. A parser that must see what follows opens a probe, reads on, and
rewinds the probe: then the text is read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar


class Markers:
    """Looks for the first of several fixed strings.

    Args:
        literals: The strings, none empty, none part of another.
    """

    def __init__(self, *literals: str) -> None:
        assert literals and all(literals), "a marker is not empty"
        assert not any(a in b for a in literals for b in literals if a is not b), "no marker contains another"
        self.literals = literals
        self._pattern = re.compile("|".join(map(re.escape, literals)))
        self.find = self._pattern.search
        """Finds the first marker in a text, from a place on."""
        self.may_begin = re.compile("[" + "".join(re.escape(literal[0]) for literal in literals) + "]").search
        """Finds the first character of any marker in a text."""
        self._longest_prefix = max(map(len, literals)) - 1
        # The leftmost place from which the text up to its end is the beginning of a marker.
        self._beginning = re.compile("|".join(_beginning_of(literal) for literal in literals))

    def remove(self, text: str) -> str:
        """``text`` without the markers in it."""
        return self._pattern.sub("", text)

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of ``text[start:]`` may be the beginning of a marker."""
        tail = len(text) - self._longest_prefix
        match = self._beginning.search(text, tail if tail > start else start)
        return len(text) - match.start() if match else 0


@lru_cache(maxsize=256)
def markers_of(*literals: str) -> Markers:
    """The markers with these literals, which streams share."""
    return Markers(*literals)


def _beginning_of(literal: str) -> str:
    """A pattern for the proper beginnings of ``literal`` at the end of a text."""
    if len(literal) == 1:
        return "(?!)"
    pattern = ""
    for char in reversed(literal[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(literal[0]) + pattern + r"\Z"


T = TypeVar("T")

Steps = Generator[None, None, T]
"""A computation that yields when it needs more text, and returns a ``T``."""

Emit = Callable[[str], None]
"""Takes the next piece of something that is streamed."""

_SPACE = re.compile(r"\s+")
_SPACES = re.compile(r"\s*")


class Source:
    """A text that arrives in pieces, and the place up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._closed = False
        self._record: list[str] | None = None
        self._probes: list[list[str]] = []
        self._passing: tuple[Markers | None, Emit] | None = None
        """Set while a primitive waits that has read all that came, and streams what comes to a function up to a marker."""

    def pass_on(self, text: str) -> bool:
        """Streams the next piece without a parser's help, if that is all that would become of it; returns whether it did."""
        passing = self._passing
        if passing is None or self._record is not None or self._probes:
            return False
        markers, emit = passing
        if markers is not None and markers.may_begin(text):
            return False
        emit(text)
        return True

    def feed(self, text: str) -> None:
        """Append the next piece."""
        assert not self._closed, "the text has ended"
        if self._position == len(self._text):
            self._text = text
        else:
            self._text = self._text[self._position :] + text
        self._position = 0

    def close(self) -> None:
        """Ends the text."""
        self._closed = True

    def start_recording(self, read_before: str = "") -> None:
        """Begin a new record with ``read_before``; it takes all that is read from now on."""
        self._record = [read_before]

    def stop_recording(self) -> str:
        """What was read since ``start_recording``, or "" if nothing is being recorded."""
        record, self._record = self._record, None
        return "".join(record) if record else ""

    def open_probe(self) -> None:
        """Begin to record the text that is read, so that it can be read again."""
        self._probes.append([])

    def close_probe(self) -> str:
        """End the latest probe. Returns what was read since it was opened."""
        return "".join(self._probes.pop())

    def rewind(self) -> None:
        """End the latest probe, and go back to where it was opened."""
        pieces = self._probes.pop()
        for log in (*self._probes, *([] if self._record is None else [self._record])):
            del log[len(log) - len(pieces) :]
        text = "".join(pieces)
        missing = len(text) - self._position
        if missing > 0:  # a later piece has replaced what was read
            self._text = text[:missing] + self._text
            self._position += missing
        self._position -= len(text)

    def give_back(self, piece: str) -> None:
        """Undo the latest ``take``, which returned ``piece``. No primitive was called since."""
        self._position -= len(piece)
        for log in (*self._probes, *([] if self._record is None else [self._record])):
            del log[-1]

    def take(self, count: int) -> str:
        """Read ``count`` characters that are known to be there."""
        piece = self._text[self._position : self._position + count]
        self._position += len(piece)
        if self._record is not None:
            self._record.append(piece)
        if self._probes:
            for probe in self._probes:
                probe.append(piece)
        return piece

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches at this place of the text that has come; "" if nothing does.

        ``pattern`` is a run of characters of one class, so that two matches side by side are as good as one.
        """
        match = pattern.match(self._text, self._position)
        return self.take(match.end() - self._position) if match else ""

    def come(self) -> str:
        """The next character if it has come; "" if not. ``peek`` waits for it."""
        return self._text[self._position : self._position + 1]

    def space_ahead(self) -> str | None:
        """The white space that comes next, without reading it. None if what follows it has not come."""
        match = _SPACES.match(self._text, self._position)
        return match.group() if match and match.end() < len(self._text) else None

    def come_space(self) -> str | None:
        """Read white space if what follows it has come. None and nothing read if not; ``whitespace`` waits for it."""
        space = self.space_ahead()
        return self.take(len(space)) if space else space

    def more(self) -> Steps[bool]:
        """Wait for at least one character. False at the end of the text."""
        while self._position == len(self._text):
            if self._closed:
                return False
            yield
        return True

    def peek(self, count: int = 1) -> Steps[str]:
        """The next ``count`` characters without reading them; fewer only at the end of the text."""
        while len(self._text) - self._position < count and not self._closed:
            yield
        return self._text[self._position : self._position + count]

    def accept(self, *literals: str) -> Steps[str]:
        """Read the one of ``literals`` that comes next. "" and nothing read if none does.

        No literal may be the beginning of another.
        """
        return self.take(len((yield from self.ahead(*literals))))

    def ahead(self, *literals: str) -> Steps[str]:
        """The one of ``literals`` that comes next, without reading it. "" if none does."""
        longest = max(map(len, literals))
        while True:
            ahead = self._text[self._position : self._position + longest]
            for literal in literals:
                if ahead.startswith(literal):
                    return literal
            if self._closed or not any(literal.startswith(ahead) for literal in literals):
                return ""
            yield

    def word(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Read a run of the characters of ``pattern``, at most ``limit`` of them."""
        pieces: list[str] = []
        left = limit
        while left and (yield from self.more()):
            match = pattern.match(self._text, self._position, self._position + left)
            if not match:
                break
            pieces.append(self.take(match.end() - self._position))
            left -= len(pieces[-1])
        return "".join(pieces)

    def whitespace(self) -> Steps[str]:
        """Read white space."""
        pieces: list[str] = []
        while (yield from self.more()) and (run := self.take_run(_SPACE)):
            pieces.append(run)
        return "".join(pieces)

    def at_end(self) -> Steps[bool]:
        """Whether nothing more comes."""
        return not (yield from self.more())

    def until(self, markers: Markers, emit: Emit, partial: Emit | None = None) -> Steps[str]:
        """Stream the text before the first of ``markers`` to ``emit``, read the marker and return it.

        Returns "" at the end of the text. Text that may be the beginning of a marker is held back; at the end of the text it goes
        to ``partial``, or to ``emit`` if that is None.
        """
        find, held_at = markers.find, markers.held
        while True:
            text, position = self._text, self._position
            match = find(text, position)
            if match:
                start, end = match.span()
                if start > position:
                    emit(self.take(start - position))
                return self.take(end - start)
            held = 0 if self._closed and partial is None else held_at(text, position)
            ready = len(text) - position - held
            if ready:
                emit(self.take(ready))
            if self._closed:
                if held and partial is not None:
                    partial(self.take(held))
                return ""
            if not held:
                self._passing = markers, emit
            yield
            self._passing = None

    def rest(self, emit: Emit) -> Steps[None]:
        """Stream all that comes."""
        while True:
            if self._position < len(self._text):
                emit(self.take(len(self._text) - self._position))
            if self._closed:
                return
            self._passing = None, emit
            yield
            self._passing = None
