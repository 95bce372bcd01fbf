"""The interface of a family of tool-call formats, and the loop that most of them share.

All families keep these rules.

* A call is reported as soon as it is certain: its start once the name is known, its arguments as they come.
* Arguments that were begun are JSON in the end, whatever the model wrote and wherever it was cut (``incremental.json_values``).
* A damaged call costs at most itself: the calls before it and behind it are found.
* No marker comes out as text. What opens a call but is none loses its markers; if it is cut off by the end of the output, it is
  dropped. The exception is text about markers: one behind a backtick, and an opener that a word or a full stop follows as in a
  sentence (``the <tool_call> tag``), with the closer after it.
* Inside a call that has started, anything that is not part of the format comes out as text, except left-over brackets and quotes
  at its end.
* A call of a tool that was not offered is reported like any other, if the format marks calls; the client can tell the model so.
  Where calls are not marked (``llama3_json``, ``pythonic``) it is text.
* Names are at most ``NAME_LIMIT`` characters long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_text.incremental.json_values import JsonReader
from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Markers, Source, Steps
from sapwood_text.tool_parser.tools import Tools

NAME_LIMIT = 256
"""Longest name of a tool, a parameter or a call, in characters."""
ANYTHING = re.compile(r"(?s:.)")
"""What any call begins with whose markers never stand in text."""
_LEFT_OVER = re.compile(r"[\s}\])\"'`,;]+")
_LEFT_OVER_LIMIT = 64


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
        openers: Literals with which a marked call begins; calls inside reasoning are looked for by them.
    """

    name: str
    script: Callable[[Source, Emitter, Tools], Steps[None]]
    special_tokens: frozenset[str]
    make_id: Callable[[str, int], str] = long_id
    openers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallMarkers:
    """The markers around calls.

    Attributes:
        openers: Literals after which a call may begin.
        closers: Literals that may follow a call and are dropped.
        all: Both, and the parts of a call that are dropped where no call is open.
        json: Reads arguments; they end at any of the markers.
    """

    openers: Markers
    closers: Markers
    all: Markers
    json: JsonReader

    @classmethod
    def of(
        cls,
        openers: tuple[str, ...],
        closers: tuple[str, ...],
        parts: tuple[str, ...] = (),
        quote: str = "",
        head: re.Pattern[str] | None = None,
    ) -> CallMarkers:
        """Makes markers of their literals.

        Args:
            openers: The openers.
            closers: The closers.
            parts: Markers inside a call, between an opener and a closer.
            quote: The marker that quotes strings, if the format has its own.
            head: What a call begins with up to its first string, if no quote stands before.
        """
        literals = (*openers, *closers, *parts)
        quotes = (quote,) if quote else ()
        return cls(
            Markers(*openers),
            Markers(*closers, *parts, *quotes),
            Markers(*literals, *quotes),
            JsonReader(*literals, quote=quote, head=head),
        )


Attempt = Callable[[], Steps[bool]]


def marked_calls(
    source: Source, out: Emitter, markers: CallMarkers, attempt: Attempt, begins: re.Pattern[str] | None = None
) -> Steps[None]:
    """Parse an output whose calls are opened by markers.

    Args:
        source: The output.
        out: Where its text goes.
        markers: The markers.
        attempt: Reads on after what opens a call, while the source records; returns whether a call was started. When it returns,
            recorded text is emitted as text.
        begins: A pattern for the first character of a call; it distinguishes calls from text that mentions an opener. By default
            ``{`` and ``[``.
    """
    mentioned = False
    while True:
        marker, quoted = yield from next_marker(source, out, markers.all)
        if not marker:
            return
        if quoted or (mentioned and marker in markers.closers.literals):
            out.text(marker)
            mentioned = False
            continue
        mentioned = False
        if marker in markers.closers.literals:
            continue
        opener = marker
        space = yield from source.whitespace()
        while (yield from source.ahead(*markers.openers.literals)):
            opener = yield from source.accept(*markers.openers.literals)
            space = yield from source.whitespace()
        first = yield from source.peek()
        if first == "" or (yield from source.ahead(*markers.closers.literals)):
            continue
        source.start_recording()
        started = yield from attempt()
        left = source.stop_recording()
        if started or (begins or _JSON_BEGINS).match(first):
            # Text before a marker or the end of the output is a part of the call.
            if not (yield from source.at_end()) and not (yield from source.ahead(*markers.all.literals)):
                out.text(markers.all.remove(left))
            if started:
                yield from drop_left_over(source, markers.all)
        else:
            mentioned = is_mention(opener, space + left + (yield from source.peek(3)))
            out.text(opener + space + left if mentioned else markers.all.remove(left))


_JSON_BEGINS = re.compile(r"[{\[]")
_IN_SENTENCE = re.compile(r"[ \t]+[^\s{\[\"]|[.,:;!?)'\"`*]+(?![\w{])")
_CODE = re.compile(r"`[^`]+`\Z")
_LINE_KEPT = 64
_SPACED = re.compile(r"[ \t]+[^\s\"'=>]")
_TAG_REST = re.compile(r"[\"']*\s*/?>")


def is_mention(marker: str, left: str) -> bool:
    """Whether what follows an opener says that the text is about it.

    Args:
        marker: The opener; if it is the beginning of a tag, the tag ends behind it.
        left: What follows, which no call begins with.
    """
    if marker.endswith((">", "]")):
        return bool(_IN_SENTENCE.match(left))
    rest = _TAG_REST.match(left)
    return bool(_IN_SENTENCE.match(left, rest.end()) if rest else _SPACED.match(left))


def next_marker(source: Source, out: Emitter, markers: Markers) -> Steps[tuple[str, bool]]:
    """Pass text on up to the next marker. Returns it, and whether it stands behind one backtick; "" at the end of the text."""
    last = ""

    def emit(piece: str) -> None:
        nonlocal last
        last = (last + piece)[-_LINE_KEPT:]
        out.text(piece)

    marker = yield from source.until(markers, emit)
    quoted = last.endswith("`") and not last.endswith("``")
    if quoted and _CODE.search(last):  # the backtick closes one before it
        quoted = (yield from source.peek()) == "`"
    return marker, quoted


def drop_left_over(source: Source, markers: Markers) -> Steps[None]:
    """Read the brackets and quotes that are left over between a call and a marker or the end of the output."""
    source.open_probe()
    left = yield from source.word(_LEFT_OVER, _LEFT_OVER_LIMIT)
    if left.strip() and ((yield from source.at_end()) or (yield from source.ahead(*markers.literals))):
        source.close_probe()
    else:
        source.rewind()


def start_call(source: Source, out: Emitter, name: str, call_id: str | None = None) -> None:
    """Report a call and forget its text; the text from now on is recorded again."""
    out.start_call(name, call_id)
    source.start_recording()


def copy_arguments(source: Source, out: Emitter, json: JsonReader) -> Steps[None]:
    """Read the arguments of the call that was started. The text that the source recorded is part of the call."""
    source.stop_recording()
    if not (yield from json.arguments(source, out.arguments)):
        out.note_cut()
    source.start_recording()
