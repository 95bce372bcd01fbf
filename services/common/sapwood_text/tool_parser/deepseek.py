"""DeepSeek V3, R1 and V3.1: calls between full-width tags.

V3 and R1: ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>``.
V3.1: ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``.
Calls stand between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``, which the models at times leave out.
Both forms are read whatever the model: a name after the separator tells them apart. So does the fence; without it, ``function``
is the kind of a call whose name was left out only if no tool is called so.

Source: the templates published with the models.
"""

from __future__ import annotations

import re

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

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_MARKERS = CallMarkers.of(openers=(_SECTION, _CALL), closers=(_CALL_END, _SECTION_END), parts=(_SEPARATOR,))
_NAME = re.compile(r"[^\s<`{\"']+")


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        name = yield from source.word(_NAME, NAME_LIMIT)
        yield from source.whitespace()
        separated = False
        while (yield from source.accept(_SEPARATOR)):
            separated = True
            yield from source.whitespace()
        if not name and not separated:
            return False
        inner = yield from source.word(_NAME, NAME_LIMIT) if separated else source.whitespace()
        yield from source.whitespace()
        fence = yield from source.accept(_FENCE)
        if fence:
            yield from source.accept("json")
            yield from source.whitespace()
        name = inner or name
        first = yield from source.peek()
        empty = bool(fence and (yield from source.ahead(_FENCE)))
        ended = first == "" or empty or bool((yield from source.ahead(*_MARKERS.all.literals)))
        if not name or not (first in ("{", '"') or (ended and (separated or name in tools))):
            return False
        if ended and first == "" and not fence and not inner and name == "function":
            return False
        out.start_call(name)
        if empty:
            out.arguments("{}")
        else:
            yield from copy_arguments(source, out, _MARKERS.json)
        yield from source.whitespace()
        if fence:
            yield from source.accept(_FENCE)
        source.start_recording()
        return True

    yield from marked_calls(source, out, _MARKERS, attempt, ANYTHING)


DEEPSEEK = ToolFamily("deepseek", _script, frozenset(_MARKERS.all.literals), openers=_MARKERS.openers.literals)
