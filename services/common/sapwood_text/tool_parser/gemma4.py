"""Gemma 4: ``<|tool_call>call:f{k:<|"|>v<|"|>,n:3}<tool_call|>``, one block a call.

Keys have no quotes. Strings stand between two ``<|"|>``, which inside a string stands for a quote; other values are JSON.
The models at times leave ``call`` or an opening quote out, or write ``call:f(k=...)``; a value without quotes that is no JSON
is a string.

Source: the function-calling guide and the template published with the models.
"""

from __future__ import annotations

import re

from sapwood_text.incremental.json_values import KEYWORDS
from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Source, Steps
from sapwood_text.tool_parser.base import (
    ANYTHING,
    NAME_LIMIT,
    CallMarkers,
    ToolFamily,
    copy_arguments,
    marked_calls,
)
from sapwood_text.tool_parser.tools import Tools

_CALL, _CALL_END = "<|tool_call>", "<tool_call|>"
_RESPONSE = "<|tool_response>"
_QUOTE = '<|"|>'
_HEAD = re.compile(
    r"<\|tool_call>(?:\s*call)?\s*:?\s*[\w.\-]+\s*[{(]\s*(?:\w+\s*[:=].*,)?\s*"
    r"\w+\s*[:=]\s*(?:[\[{]\s*(?:\w+\s*[:=]\s*)?)*\Z",
    re.DOTALL,
)
_MARKERS = CallMarkers.of(openers=(_CALL,), closers=(_CALL_END, _RESPONSE), quote=_QUOTE, head=_HEAD)
_NAME = re.compile(r"[\w.\-]+")


def _script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        word = yield from source.word(_NAME, NAME_LIMIT)
        yield from source.whitespace()
        if (yield from source.accept(":")):
            yield from source.whitespace()
            word = yield from source.word(_NAME, NAME_LIMIT)
            yield from source.whitespace()
        opening = yield from source.ahead("{", "(", _CALL_END)
        if not word or not opening:
            return False
        out.start_call(word)
        if opening != "(":
            yield from copy_arguments(source, out, _MARKERS.json)
            return True
        source.take(1)
        source.stop_recording()
        out.arguments("{")
        if not (yield from _MARKERS.json.value(source, out.arguments, KEYWORDS)):
            out.note_cut()
        source.start_recording()
        return True

    yield from marked_calls(source, out, _MARKERS, attempt, ANYTHING)


GEMMA4 = ToolFamily("gemma4", _script, frozenset(_MARKERS.all.literals), openers=(_CALL,))
