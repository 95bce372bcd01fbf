"""Hermes and Qwen: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, one block a call.

Source: the function-calling format published with the Hermes 2 Pro model card, and Qwen2.5's and Qwen3's templates.
"""

from __future__ import annotations

from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Source, Steps
from sapwood_text.tool_parser.base import CallMarkers, ToolFamily, marked_calls
from sapwood_text.tool_parser.call_object import parse_calls
from sapwood_text.tool_parser.tools import Tools

_MARKERS = CallMarkers.of(openers=("<tool_call>",), closers=("</tool_call>",))


def _script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
    return marked_calls(source, out, _MARKERS, lambda: parse_calls(source, out, _MARKERS.json))


HERMES = ToolFamily("hermes", _script, frozenset(_MARKERS.all.literals), openers=_MARKERS.openers.literals)
