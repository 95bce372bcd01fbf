"""gpt-oss: the harmony format, in which reasoning, text and calls are messages of their own.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}
<|call|>``. A message with a recipient is a call (of ``f`` for ``functions.f``; built-in tools keep their full name); else
channel ``analysis`` is reasoning, and ``final`` and ``commentary`` are text. The recipient may stand with the role or with the
channel. The prompt ends with ``<|start|>assistant``, so the output begins inside a header. Messages of a kind that follow
each other are set apart by a line break.

Anything outside a message is text, and so is a malformed header without its markers. A header that the end of the output cuts
off is dropped. Where ``<|message|>`` was left out or misspelt, the content of a call begins at its brace. The next header ends
a message whose end was left out. Arguments that are no object are a JSON string.

Source: OpenAI's description of the harmony response format.
"""

from __future__ import annotations

import re

from sapwood_text.incremental.json_values import JsonReader, json_text
from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Emit, Markers, Source, Steps
from sapwood_text.tool_parser.base import ToolFamily, next_marker
from sapwood_text.tool_parser.tools import Tools

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ALL = Markers(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_HEADER_TEXT = re.compile(r"[^<{]+")
_HEADER_LIMIT = 1024
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_MARKER = re.compile("|".join(map(re.escape, _ALL.literals)))
_UNKNOWN = re.compile(r"[<|\w>]+")
_NO_TOOLS = frozenset(["assistant", "user", "all"])
_JSON = JsonReader(*_ALL.literals)


def _script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
    text = _Separated(out.text)
    reasoning = _Separated(out.reasoning)
    source.start_recording()
    yield from source.whitespace()
    marker = yield from source.accept("to=")
    if not marker:
        out.text(source.stop_recording())
    while True:
        if not marker:
            marker, quoted = yield from next_marker(source, out, _ALL)
            if not marker:
                return
            if quoted:
                out.text(marker)
            if quoted or marker in _ENDS or marker == _CONSTRAIN:
                marker = ""
                continue
            source.start_recording(marker)
        header = yield from _read_header(source, marker)
        marker = ""
        left = source.stop_recording()
        if header is None:
            if not _MARKER.search(left) or not (yield from source.at_end()):
                out.text(_MARKER.sub("", left))
            continue
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        while (yield from source.accept(_MESSAGE)):
            pass
        if recipient and recipient[1] not in _NO_TOOLS:
            out.start_call(recipient[1].removeprefix("functions."))
            end = yield from _copy_arguments(source, out)
        else:
            message = reasoning if channel and channel[1] == "analysis" else text
            message.begin()
            end = yield from _copy_content(source, message.emit)
        if end in (_START, _CHANNEL):
            source.start_recording(end)
            marker = end


def _read_header(source: Source, marker: str) -> Steps[str | None]:
    """Read on after ``marker`` up to the content; None if this is no header or it is cut."""
    header = marker
    while marker != _MESSAGE:
        header += yield from source.word(_HEADER_TEXT, _HEADER_LIMIT - len(header))
        if _RECIPIENT.search(header) and (yield from _content_begins(source)):
            return header
        marker = yield from source.accept(_CHANNEL, _CONSTRAIN, _MESSAGE)
        if not marker or len(header) >= _HEADER_LIMIT - len(marker):
            return None
        header += marker
    return header


def _content_begins(source: Source) -> Steps[bool]:
    """Whether the arguments of a call begin without ``<|message|>``, perhaps behind a misspelt one, which is read."""
    source.open_probe()
    if not (yield from source.ahead(*_ALL.literals)):
        yield from source.word(_UNKNOWN, 32)
        yield from source.whitespace()
        if (yield from source.peek()) == "{":
            source.close_probe()
            return True
    source.rewind()
    return False


def _copy_content(source: Source, emit: Emit) -> Steps[str]:
    """Stream the content of a message; returns the marker that ended it."""
    while True:
        end = yield from source.until(_ALL, emit)
        if end not in (_MESSAGE, _CONSTRAIN):
            return end


def _copy_arguments(source: Source, out: Emitter) -> Steps[str]:
    """Stream the content of a call; returns the marker that ended it. No content is ``{}``."""
    yield from source.whitespace()
    first = yield from source.peek()
    if first in '{"' or (yield from source.ahead("null", *_ALL.literals)):  # first is "" at the end of the text
        if not (yield from _JSON.arguments(source, out.arguments)):
            out.note_cut()
        return (yield from _copy_content(source, _leave_out))
    out.arguments('"')
    end = yield from _copy_content(source, lambda piece: out.arguments(json_text(piece)[1:-1]))
    out.arguments('"')
    return end


class _Separated:
    """Sets the messages of one kind apart by a line break."""

    def __init__(self, target: Emit) -> None:
        self._target = target
        self._separator = ""
        self._empty = True

    def begin(self) -> None:
        """Begins the next message."""
        if not self._empty:
            self._separator = "\n"

    def emit(self, piece: str) -> None:
        """Emits more of the message."""
        self._target(self._separator + piece)
        self._separator = ""
        self._empty = False


def _leave_out(_piece: str) -> None:
    pass


GPT_OSS = ToolFamily("gpt_oss", _script, frozenset(_ALL.literals))
"""The tool and the reasoning parser of gpt-oss in one, since its format has both in one."""
