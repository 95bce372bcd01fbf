"""DeepSeek V3, R1 and V3.1: calls between full-width tags.

V3 and R1: ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>``.
V3.1: ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``.
Calls stand between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``, which the models at times leave out.
Both forms are read whatever the model: a brace after the separator tells them apart.

Source: the templates published with the models.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.json_scanner import copy_value
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, CallMarkers, ToolFamily, marked_calls
from sapwood_tokenizer.output.tool_parser.tools import Tools

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_MARKERS = CallMarkers.of(openers=(_SECTION, _CALL), closers=(_CALL_END, _SECTION_END))
_NAME = re.compile(r"[^\s<`{]+")


def _script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        yield from source.whitespace()
        name = yield from source.word(_NAME, NAME_LIMIT)
        if not name or not (yield from source.accept(_SEPARATOR)):
            return False
        yield from source.whitespace()
        fence = ""
        if (yield from source.peek()) != "{":
            name = yield from source.word(_NAME, NAME_LIMIT)
            yield from source.whitespace()
            fence = yield from source.accept(_FENCE)
            if fence:
                yield from source.accept("json")
                yield from source.whitespace()
            if not name or (yield from source.peek()) != "{":
                return False
        out.start_call(name)
        source.stop_recording()
        yield from copy_value(source, out.arguments)
        yield from source.whitespace()
        if fence:
            yield from source.accept(_FENCE)
        return True

    yield from marked_calls(source, out, _MARKERS, attempt)


DEEPSEEK = ToolFamily("deepseek", _script, frozenset([*_MARKERS.all.literals, _SEPARATOR]))
