"""Llama 3.1 to 3.3: ``{"name": "f", "parameters": {...}}``, several separated by ``;``.

A call may follow ``<|python_tag|>``, anywhere. Without the tag a call

- begins the output or a line;
- names a tool on offer, or any name if the request does not say which are on offer;
- has an object as parameters, or none at all if the tool is known.

Any other JSON is an answer in JSON and comes out as text.

Source: Meta's prompt-format pages for Llama 3.1 and 3.2.
"""

from __future__ import annotations

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import ToolFamily
from sapwood_tokenizer.output.tool_parser.call_object import MARKED, CallRules, parse_call_object
from sapwood_tokenizer.output.tool_parser.tools import Tools

_TAG = "<|python_tag|>"
_STARTS = Markers(_TAG, "\n")


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    unmarked = CallRules(marked=False, accepts=lambda name: not tools or name in tools, accepts_bare=len(tools) > 0)
    marker = ""
    while True:
        source.start_recording(marker)
        yield from source.whitespace()
        tagged = (yield from source.accept(_TAG)) or marker == _TAG
        yield from source.whitespace()
        rules = MARKED if tagged else unmarked
        while (yield from parse_call_object(source, out, rules)):
            yield from source.whitespace()
            if not (yield from source.accept(";")):
                break
            yield from source.whitespace()
        out.text(source.stop_recording())
        marker = yield from source.until(_STARTS, out.text)
        if not marker:
            return


LLAMA3_JSON = ToolFamily("llama3_json", _script, frozenset([_TAG]))
