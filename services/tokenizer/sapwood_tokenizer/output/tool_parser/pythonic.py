"""Llama 4, and Llama 3.2 when asked to: a list of Python calls, ``[f(a=1), g(b="x")]``.

The list may stand between ``<|python_start|>`` and ``<|python_end|>``, anywhere. Without them it must begin the output or
a line and name tools on offer (any, if the request does not say which are). Arguments are keyword arguments whose
values are literals; they come out as JSON. A call is certain once the first keyword and its ``=``, or ``()``, was read.

Source: Meta's prompt-format pages for Llama 3.2 and Llama 4.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, ToolFamily, start_call
from sapwood_tokenizer.output.tool_parser.python_literal import copy_literal, json_text
from sapwood_tokenizer.output.tool_parser.tools import Tools

_START = "<|python_start|>"
_END = "<|python_end|>"
_STARTS = Markers(_START, _END, "\n")
_NAME = re.compile(r"[\w.\-]+")
_KEYWORD = re.compile(r"\w+")


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    called = False
    marker = ""
    while True:
        if marker == _END and called:
            marker = ""
        source.start_recording(marker)
        yield from source.whitespace()
        tagged = (yield from source.accept(_START)) or marker == _START
        yield from source.whitespace()
        called = (yield from _parse_list(source, out, None if tagged or not tools else tools)) or called
        out.text(source.stop_recording())
        marker = yield from source.until(_STARTS, out.text)
        if not marker:
            return


def _parse_list(source: Source, out: Emitter, tools: Tools | None) -> Steps[bool]:
    """Read a list of calls; returns whether one was started. What is no part of one is left in the record."""
    called = False
    separator = yield from source.accept("[")
    while separator in ("[", ","):
        yield from source.whitespace()
        name = yield from source.word(_NAME, NAME_LIMIT)
        if not name or (tools is not None and name not in tools) or not (yield from source.accept("(")):
            break
        yield from source.whitespace()
        whole = True
        if (yield from source.accept(")")):
            start_call(source, out, name)
            out.arguments("{}")
        else:
            keyword = yield from _read_keyword(source)
            if not keyword:
                break
            start_call(source, out, name)
            whole = yield from _parse_arguments(source, out, keyword)
        called = True
        yield from source.whitespace()
        separator = yield from source.accept(",", "]")
        if not whole or not separator:
            break
        if separator == "]":
            source.start_recording()
    return called


def _read_keyword(source: Source) -> Steps[str]:
    """Read a keyword and its ``=``; "" if none comes here."""
    keyword = yield from source.word(_KEYWORD, NAME_LIMIT)
    yield from source.whitespace()
    return keyword if (yield from source.accept("=")) else ""


def _parse_arguments(source: Source, out: Emitter, keyword: str) -> Steps[bool]:
    """Read arguments from after the first keyword to the closing bracket; False if they are broken or cut."""
    opening = "{"
    while True:
        out.arguments(f"{opening}{json_text(keyword)}: ")
        source.stop_recording()
        whole = yield from copy_literal(source, out.arguments)
        source.start_recording()
        if not whole:
            return False
        opening = ", "
        yield from source.whitespace()
        comma = yield from source.accept(",")
        yield from source.whitespace()
        if (yield from source.accept(")")):
            break
        keyword = (yield from _read_keyword(source)) if comma else ""
        if not keyword:
            return False
    out.arguments("}")
    source.start_recording()
    return True


PYTHONIC = ToolFamily("pythonic", _script, frozenset([_START, _END]))
