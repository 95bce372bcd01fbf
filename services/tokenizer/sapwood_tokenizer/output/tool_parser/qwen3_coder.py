"""Qwen3-Coder: ``<tool_call><function=f><parameter=k>v</parameter></function></tool_call>``, tags on lines of their own.

One line break at each end of a value belongs to the format. The models at times leave ``<tool_call>`` out. Strings are
written without quotes, other values as JSON.

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

_CALL = "<tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = "<parameter="
_MARKERS = CallMarkers.of(openers=(_CALL, _FUNCTION), closers=(_FUNCTION_END, "</tool_call>"))
_VALUE_ENDS = Markers("</parameter>")
_NAME = re.compile(r"[^\s<>]+")


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        name = yield from source.word(_NAME, NAME_LIMIT)
        if not name or not (yield from source.accept(">")):
            return False
        start_call(source, out, name)
        arguments = TaggedArguments(source, out, _VALUE_ENDS, trims_line=True)
        while True:
            yield from source.whitespace()
            tag = yield from source.accept(_PARAMETER, _FUNCTION_END)
            if tag != _PARAMETER:
                break
            key = yield from source.word(_NAME, NAME_LIMIT)
            if not key or not (yield from source.accept(">")):
                return True
            if not (yield from arguments.copy(key, tools.types(name, key))):
                return True
        if tag:
            arguments.close()
        return True

    yield from marked_calls(source, out, _MARKERS, attempt)


QWEN3_CODER = ToolFamily("qwen3_coder", _script, frozenset(_MARKERS.all.literals))
