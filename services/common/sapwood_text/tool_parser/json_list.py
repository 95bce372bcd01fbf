"""Calls as one JSON list behind a marker: Granite 3 and Phi-4 mini, and Cohere's Command R7B, A and Aya.

Granite: ``<|tool_call|>[{"name": "f", "arguments": {...}}, ...]``, from 3.1 on often ``<tool_call>`` in front; Phi-4 mini has
``<|/tool_call|>`` after it. Cohere: ``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}, ...]
<|END_ACTION|>``; its answers stand between ``<|START_RESPONSE|>`` and ``<|END_RESPONSE|>``, which are dropped. One object
without the list's brackets is a call, too.

Source: the chat templates and documentation that IBM, Microsoft and Cohere publish with the models.
"""

from __future__ import annotations

from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Source, Steps
from sapwood_text.tool_parser.base import CallMarkers, ToolFamily, marked_calls
from sapwood_text.tool_parser.call_object import parse_calls
from sapwood_text.tool_parser.tools import Tools


def _family(name: str, openers: tuple[str, ...], closers: tuple[str, ...], parts: tuple[str, ...] = ()) -> ToolFamily:
    markers = CallMarkers.of(openers, closers, parts)

    def script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
        return marked_calls(source, out, markers, lambda: parse_calls(source, out, markers.json))

    return ToolFamily(name, script, frozenset(markers.all.literals), openers=openers)


GRANITE = _family("granite", ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>"))
COHERE = _family(
    "cohere",
    ("<|START_ACTION|>",),
    ("<|END_ACTION|>",),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
