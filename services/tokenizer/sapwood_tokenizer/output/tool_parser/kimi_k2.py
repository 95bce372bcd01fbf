"""Kimi K2: ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``.

Calls stand between ``<|tool_calls_section_begin|>`` and ``<|tool_calls_section_end|>``. The model names each call itself, with
the tool and a running number; the template wants that id back.

Source: the tool-calling guide and the template published with the model.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.json_scanner import copy_value
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, CallMarkers, ToolFamily, marked_calls
from sapwood_tokenizer.output.tool_parser.tools import Tools

SECTION = "<|tool_calls_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_MARKERS = CallMarkers.of(openers=(SECTION, _CALL), closers=(_CALL_END, _SECTION_END))
_ID = re.compile(r"[^\s<{]+")
_NUMBER = re.compile(r":[0-9]+$")


def _script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        yield from source.whitespace()
        call_id = yield from source.word(_ID, NAME_LIMIT)
        yield from source.whitespace()
        name = _NUMBER.sub("", call_id.removeprefix("functions."))
        if not name or not (yield from source.accept(_ARGUMENTS)):
            return False
        out.start_call(name, call_id if _NUMBER.search(call_id) else None)
        source.stop_recording()
        yield from source.whitespace()
        yield from copy_value(source, out.arguments)
        return True

    yield from marked_calls(source, out, _MARKERS, attempt)


KIMI_K2 = ToolFamily("kimi_k2", _script, frozenset([*_MARKERS.all.literals, _ARGUMENTS]))
