"""Llama 4, and Llama 3.2 when asked to: a list of Python calls, ``[f(a=1), g(b="x")]``.

The list may stand between ``<|python_start|>`` and ``<|python_end|>``, anywhere. Without them it must begin the output or
a line and name tools on offer (any, if the request does not say which are). Arguments are keyword arguments whose
values are literals; they come out as JSON. A call is certain once the first keyword and its ``=``, or ``()``, was read.
Errors in a call are left out, up to its closing parenthesis or the next call.

Source: Meta's prompt-format pages for Llama 3.2 and Llama 4.
"""

from __future__ import annotations

import re

from sapwood_text.incremental.json_values import KEYWORDS, JsonReader
from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Markers, Source, Steps
from sapwood_text.tool_parser.base import NAME_LIMIT, ToolFamily, drop_left_over, start_call
from sapwood_text.tool_parser.tools import Tools

_START = "<|python_start|>"
_END = "<|python_end|>"
_STARTS = Markers(_START, _END, "\n")
_NAME = re.compile(r"[\w.\-]+")
_KEYWORD = re.compile(r"\w+")
_REST = re.compile(r"[^\n()<]+")
_REST_LIMIT = 1024
_HEAD = re.compile(r"\[\s*[\w.\-]+\(\s*(?:\w+\s*=.*[,\s])?\w+\s*=\s*[\[{(]*\Z", re.DOTALL)
_JSON = JsonReader(_START, _END, "\n[", line="[", python=True, head=_HEAD)


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    marker = ""
    while True:
        tagged = marker == _START
        source.start_recording("\n" if marker == "\n" else "")
        yield from source.whitespace()
        while (yield from source.accept(_START)):
            tagged = True
            source.start_recording()
            yield from source.whitespace()
        if (yield from _parse_list(source, out, tools, tagged=tagged)):
            left = source.stop_recording()
            if left.strip():
                out.text(left)
            elif "\n" in left:
                marker = "\n"
                continue
            else:
                yield from drop_left_over(source, _STARTS)
        else:
            left = source.stop_recording()
            if left.strip() and left.endswith("\n") and (yield from source.peek()) == "[":
                out.text(left[:-1])
                marker = "\n"
                continue
            out.text(left)
        last = ""

        def emit(piece: str) -> None:
            nonlocal last
            last = piece[-1:]
            out.text(piece)

        while True:
            marker = yield from source.until(_STARTS, emit)
            if last == "`" and marker in (_START, _END):
                emit(marker)
            elif marker != _END:
                break
        if not marker:
            return


def _parse_list(source: Source, out: Emitter, tools: Tools, *, tagged: bool) -> Steps[bool]:
    """Read a list of calls; returns whether one was started. Text that is not part of a value is left in the record.

    In a tagged list any name counts as a tool. After a broken part only names of offered tools count, because text in a value may
    look like a call.
    """
    called = False
    more = tagged
    while (yield from source.accept("[")):
        more = True
        yield from source.whitespace()
    while more:
        yield from source.whitespace()
        name = yield from source.word(_NAME, NAME_LIMIT)
        if not name or (not tagged and tools and name not in tools) or not (yield from source.accept("(")):
            break
        yield from source.whitespace()
        if (yield from source.accept(")")):
            start_call(source, out, name)
            out.arguments("{}")
        elif (yield from _keyword_ahead(source)):
            start_call(source, out, name)
            source.stop_recording()
            out.arguments("{")
            whole = yield from _JSON.value(source, out.arguments, KEYWORDS)
            source.start_recording()
            if not whole and not (yield from _call_ahead(source, tools)):
                out.note_cut()
                yield from _read_rest(source)
        else:
            break
        called = True
        yield from source.whitespace()
        separator = yield from source.accept(",", "]")
        if separator == "]":
            source.start_recording()
        more = separator == "," or (separator == "" and (yield from _call_ahead(source, tools)))
    return called


def _keyword_ahead(source: Source) -> Steps[bool]:
    source.open_probe()
    keyword = yield from source.word(_KEYWORD, NAME_LIMIT)
    yield from source.whitespace()
    found = bool(keyword) and (yield from source.peek()) == "="
    source.rewind()
    return found


def _call_ahead(source: Source, tools: Tools) -> Steps[bool]:
    source.open_probe()
    yield from source.whitespace()
    name = yield from source.word(_NAME, NAME_LIMIT)
    found = bool(name) and (not tools or name in tools) and (yield from source.peek()) == "("
    source.rewind()
    return found


def _read_rest(source: Source) -> Steps[None]:
    """Read the rest of a broken call, if its closing parenthesis stands on the same line."""
    source.open_probe()
    yield from source.word(_REST, _REST_LIMIT)
    if (yield from source.accept(")")) or (yield from source.at_end()):
        source.close_probe()
        source.start_recording()
    else:
        source.rewind()


PYTHONIC = ToolFamily("pythonic", _script, frozenset([_START, _END]), openers=(_START,))
