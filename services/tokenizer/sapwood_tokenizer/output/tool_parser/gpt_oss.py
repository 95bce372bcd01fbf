"""gpt-oss: the harmony format, in which reasoning, text and calls are messages of their own.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}
<|call|>``. A message with a recipient is a call (of ``f`` for ``functions.f``; built-in tools keep their full name); else
channel ``analysis`` is reasoning, and ``final`` and ``commentary`` are text. The recipient may stand with the role or with the
channel. The prompt ends with ``<|start|>assistant``, so the output begins inside a header. Messages of a kind that follow
each other are set apart by a line break. Anything outside a message, and a malformed header, is text; a well-formed header that
the end of the output cuts off is dropped.

Source: OpenAI's description of the harmony response format.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.json_scanner import copy_value
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Emit, Source, Steps
from sapwood_tokenizer.output.tool_parser.base import ToolFamily
from sapwood_tokenizer.output.tool_parser.tools import Tools

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_OUTSIDE = Markers(_START, _CHANNEL, _MESSAGE, *_ENDS)
_CONTENT_ENDS = Markers(_START, *_ENDS)
_HEADER_TEXT = re.compile(r"[^<]+")
_HEADER_LIMIT = 1024
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_CUT_HEADER = re.compile(
    r"(<\|start\|>\w*)?(\s*to=[^\s<]*)?<\|channel\|>\w*(\s*to=[^\s<]*)?\s*(<\|constrain\|>\w*)?|<\|start\|>\w*"
)
_NO_TOOLS = frozenset(["assistant", "user", "all"])


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
            marker = yield from source.until(_OUTSIDE, out.text)
            if not marker:
                return
            if marker in _ENDS:
                marker = ""
                continue
            source.start_recording(marker)
        header = yield from _read_header(source, marker)
        marker = ""
        if header is None:
            ended = (yield from source.peek()) == ""
            left = source.stop_recording()
            if not (ended and _CUT_HEADER.fullmatch(left.strip())):
                out.text(left)
            continue
        source.stop_recording()
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        if recipient and recipient[1] not in _NO_TOOLS:
            out.start_call(recipient[1].removeprefix("functions."))
            end = yield from _copy_arguments(source, out)
        else:
            message = reasoning if channel and channel[1] == "analysis" else text
            message.begin()
            end = yield from source.until(_CONTENT_ENDS, message.emit)
        if end == _START:
            source.start_recording(_START)
            marker = _START


def _read_header(source: Source, marker: str) -> Steps[str | None]:
    """Read on after ``marker`` up to the content; None if this is no header or it is cut."""
    header = marker
    while marker != _MESSAGE:
        header += yield from source.word(_HEADER_TEXT, _HEADER_LIMIT - len(header))
        marker = yield from source.accept(_CHANNEL, _CONSTRAIN, _MESSAGE)
        if not marker or len(header) >= _HEADER_LIMIT - len(marker):
            return None
        header += marker
    return header


def _copy_arguments(source: Source, out: Emitter) -> Steps[str]:
    """Stream the content of a call; returns the marker that ended it. No content is ``{}``."""
    yield from source.whitespace()
    if (yield from source.peek()) == "{":
        yield from copy_value(source, out.arguments)
        yield from source.whitespace()
        return (yield from source.until(_CONTENT_ENDS, out.arguments))
    some: list[bool] = []

    def emit(piece: str) -> None:
        some.append(True)
        out.arguments(piece)

    end = yield from source.until(_CONTENT_ENDS, emit)
    if end and not some:
        out.arguments("{}")
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


GPT_OSS = ToolFamily("gpt_oss", _script, frozenset([*_OUTSIDE.literals, _CONSTRAIN]))
"""The tool and the reasoning parser of gpt-oss in one, since its format has both in one."""
