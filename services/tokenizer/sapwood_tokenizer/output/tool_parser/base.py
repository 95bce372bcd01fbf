"""What a family of tool-call formats is, and the loop that most of them share.

All families keep these rules.

* A call is reported as soon as it is certain: its start once the name is known, its arguments as they come. Formats
  that write arguments as JSON have them passed on as the model wrote them, valid or not.
* What is read while it may still become a call is recorded. If it turns out not to be one, the record comes out as text,
  markers included, and is not searched again.
* Inside a call that has started, anything that is not part of the format comes out as text. An argument text cut short by
  the end of the output or by broken syntax stays as far as it came.
* A call of a tool that nobody offered is reported like any other where the format marks calls; the client can tell the
  model so. Where calls are not marked (``llama3_json``, ``pythonic``) it is text.
* Names are at most ``NAME_LIMIT`` characters long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.tools import Tools

NAME_LIMIT = 256
"""Longest name of a tool, a parameter or a call, in characters."""


def long_id(seed: str, index: int) -> str:
    """An id in the form OpenAI uses. The same seed and index give the same id."""
    return "call_" + _digest(seed, index, 12)


def short_id(seed: str, index: int) -> str:
    """An id of nine letters and digits, which Mistral's templates demand."""
    return _digest(seed, index, 5)[:9]


def _digest(seed: str, index: int, size: int) -> str:
    return hashlib.blake2b(f"{index}/{seed}".encode(errors="replace"), digest_size=size).hexdigest()


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """A family of formats.

    Attributes:
        name: Its name in requests.
        script: Makes the parser of an output, given the tools on offer.
        special_tokens: Markers that may be special tokens of the vocabulary; the text must hold them.
        make_id: Makes the id of a call that the model did not name from ``(seed, index)``.
    """

    name: str
    script: Callable[[Source, Emitter, Tools], Steps[None]]
    special_tokens: frozenset[str]
    make_id: Callable[[str, int], str] = long_id


@dataclass(frozen=True, slots=True)
class CallMarkers:
    """The markers around calls.

    Attributes:
        openers: Literals after which a call may begin.
        closers: Literals that may follow a call and are dropped there. Before the first call they are text.
        all: Both.
        section: The first of two openers, after which the second must come before a call may; "" where there is one.
    """

    openers: Markers
    closers: Markers
    all: Markers
    section: str

    @classmethod
    def of(cls, openers: tuple[str, ...], closers: tuple[str, ...]) -> CallMarkers:
        """Makes markers of their literals; if there are two openers, the first begins a section of calls."""
        section = openers[0] if len(openers) > 1 else ""
        return cls(Markers(*openers), Markers(*closers), Markers(*openers, *closers), section)


def marked_calls(source: Source, out: Emitter, markers: CallMarkers, attempt: Callable[[], Steps[bool]]) -> Steps[None]:
    """Parse an output whose calls are opened by markers.

    Args:
        source: The output.
        out: Where its text goes.
        markers: The markers.
        attempt: Reads on after what opens a call, while the source records; returns whether a call was started. What the
            record holds when it returns comes out as text.
    """
    started = False
    while True:
        marker = yield from source.until(markers.all if started else markers.openers, out.text)
        if not marker:
            return
        if marker in markers.closers.literals:
            continue
        source.start_recording(marker)
        if marker == markers.section:
            yield from source.whitespace()
        if marker != markers.section or (yield from source.accept(*markers.openers.literals[1:])):
            started = (yield from attempt()) or started
        out.text(source.stop_recording())


def start_call(source: Source, out: Emitter, name: str, call_id: str | None = None) -> None:
    """Report a call and forget what was read of it; what is read from now on is recorded anew."""
    out.start_call(name, call_id)
    source.start_recording()
