"""GLM 4.5 to 4.7: ``<tool_call>f`` and, for each argument, ``<arg_key>k</arg_key> <arg_value>v</arg_value>``, ``</tool_call>``.

White space between the tags does not matter. Strings are written without quotes, other values as JSON.

Source: the templates published with the models.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, CallMarkers, ToolFamily, marked_calls, start_call
from sapwood_tokenizer.output.tool_parser.tagged_arguments import TaggedArguments
from sapwood_tokenizer.output.tool_parser.tools import Tools

_CALL_END = "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_MARKERS = CallMarkers.of(openers=("<tool_call>",), closers=(_CALL_END,))
_VALUE_ENDS = Markers(_VALUE_END)
_NAME = re.compile(r"[^\s<{]+")
_KEY_TEXT = re.compile(r"[^<]+")


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        yield from source.whitespace()
        name = yield from source.word(_NAME, NAME_LIMIT)
        yield from source.whitespace()
        tag = yield from source.accept(_KEY, _CALL_END)
        if not name or not tag:
            return False
        start_call(source, out, name)
        arguments = TaggedArguments(source, out, _VALUE_ENDS, trims_line=False)
        while tag == _KEY:
            key = yield from source.word(_KEY_TEXT, NAME_LIMIT)
            if not (yield from source.accept(_KEY_END)):
                return True
            yield from source.whitespace()
            if not (yield from source.accept(_VALUE)):
                return True
            if not (yield from arguments.copy(key.strip(), tools.types(name, key.strip()))):
                return True
            yield from source.whitespace()
            tag = yield from source.accept(_KEY, _CALL_END)
            if not tag:
                return True
        arguments.close()
        return True

    yield from marked_calls(source, out, _MARKERS, attempt)


GLM45 = ToolFamily("glm45", _script, frozenset([*_MARKERS.all.literals, _KEY, _KEY_END, _VALUE, _VALUE_END]))
