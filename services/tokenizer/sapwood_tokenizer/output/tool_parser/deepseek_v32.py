"""DeepSeek V3.2: ``<｜DSML｜invoke name="f">`` with ``<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>``.

Calls stand between ``<｜DSML｜function_calls>`` and ``</｜DSML｜function_calls>``. The model says itself which values are
strings, written without quotes; the others are JSON.

Source: the encoding published with the model.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, CallMarkers, ToolFamily, marked_calls, start_call
from sapwood_tokenizer.output.tool_parser.tagged_arguments import TaggedArguments
from sapwood_tokenizer.output.tool_parser.tools import Tools

_SECTION = "<｜DSML｜function_calls>"
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_PARAMETER, _PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
_STRING, _OTHER = '" string="true">', '" string="false">'
_MARKERS = CallMarkers.of(openers=(_SECTION, _INVOKE), closers=(_INVOKE_END, "</｜DSML｜function_calls>"))
_VALUE_ENDS = Markers(_PARAMETER_END)
_NAME = re.compile(r'[^"<>]+')
_TYPES = {_STRING: frozenset(["string"]), _OTHER: frozenset[str]()}


def _script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
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
            kind = yield from source.accept(_STRING, _OTHER)
            if not key or not kind:
                return True
            if not (yield from arguments.copy(key, _TYPES[kind])):
                return True
        if tag:
            arguments.close()
        return True

    yield from marked_calls(source, out, _MARKERS, attempt)


DEEPSEEK_V32 = ToolFamily("deepseek_v32", _script, frozenset(["｜DSML｜", *_MARKERS.all.literals]))
