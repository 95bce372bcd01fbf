"""MiniMax M2: ``<invoke name="f">`` with ``<parameter name="k">v</parameter>``, between ``<minimax:tool_call>`` tags.

Strings are written without quotes and without line breaks around them, other values as JSON.

Source: the template published with the model.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, CallMarkers, ToolFamily, marked_calls, start_call
from sapwood_tokenizer.output.tool_parser.tagged_arguments import TaggedArguments
from sapwood_tokenizer.output.tool_parser.tools import Tools

_SECTION, _SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_MARKERS = CallMarkers.of(openers=(_SECTION, _INVOKE), closers=(_INVOKE_END, _SECTION_END))
_VALUE_ENDS = Markers(_PARAMETER_END)
_NAME = re.compile(r'[^"<>]+')


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        name = yield from source.word(_NAME, NAME_LIMIT)
        if not name or not (yield from source.accept('">')):
            return False
        start_call(source, out, name)
        arguments = TaggedArguments(source, out, _VALUE_ENDS, trims_line=False)
        while True:
            yield from source.whitespace()
            tag = yield from source.accept(_PARAMETER, _INVOKE_END)
            if tag != _PARAMETER:
                break
            key = yield from source.word(_NAME, NAME_LIMIT)
            if not key or not (yield from source.accept('">')):
                return True
            if not (yield from arguments.copy(key, tools.types(name, key))):
                return True
        if tag:
            arguments.close()
        return True

    yield from marked_calls(source, out, _MARKERS, attempt)


MINIMAX_M2 = ToolFamily("minimax_m2", _script, frozenset(_MARKERS.all.literals))
