"""Calls as one JSON list behind a marker: Granite 3 and Phi-4 mini, and Cohere's Command R7B, A and Aya.

Granite: ``<|tool_call|>[{"name": "f", "arguments": {...}}, ...]``, from 3.1 on often ``<tool_call>`` in front; Phi-4 mini has
``<|/tool_call|>`` after it. Cohere: ``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}, ...]
<|END_ACTION|>``.

Source: the chat templates and documentation that IBM, Microsoft and Cohere publish with the models.
"""

from __future__ import annotations

from collections.abc import Callable

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import ToolFamily
from sapwood_tokenizer.output.tool_parser.call_object import parse_call_list
from sapwood_tokenizer.output.tool_parser.tools import Tools


def _script(openers: Markers, closer: str) -> Callable[[Source, Emitter, Tools], Steps[None]]:
    def script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
        while marker := (yield from source.until(openers, out.text)):
            source.start_recording(marker)
            yield from source.whitespace()
            if (yield from source.accept("[")) and (yield from parse_call_list(source, out)):
                yield from source.whitespace()
                if (yield from source.accept(closer)):
                    source.start_recording()
            out.text(source.stop_recording())

    return script


def _family(name: str, openers: tuple[str, ...], closer: str) -> ToolFamily:
    return ToolFamily(name, _script(Markers(*openers), closer), frozenset([*openers, closer]))


GRANITE = _family("granite", ("<|tool_call|>", "<tool_call>"), "<|/tool_call|>")
COHERE = _family("cohere", ("<|START_ACTION|>",), "<|END_ACTION|>")
