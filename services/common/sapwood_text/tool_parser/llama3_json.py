"""Llama 3.1 to 3.3: ``{"name": "f", "parameters": {...}}``, several separated by ``;`` or each on a line of its own.

A call may follow ``<|python_tag|>``, anywhere. Without the tag a call

- begins the output or a line, or follows a call and ``;``;
- names a tool on offer, or any name if the request does not say which are on offer;
- has an object as parameters, which may stand in a string, or none at all if the tool is known.

Any other JSON is an answer in JSON and comes out as text.

Source: Meta's prompt-format pages for Llama 3.1 and 3.2.
"""

from __future__ import annotations

from sapwood_text.incremental.json_values import JsonReader
from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Markers, Source, Steps
from sapwood_text.tool_parser.base import ToolFamily, drop_left_over
from sapwood_text.tool_parser.call_object import MARKED, CallRules, parse_call_object, parse_calls
from sapwood_text.tool_parser.tools import Tools

_TAG = "<|python_tag|>"
_ENDS = ("<|eom_id|>", "<|eot_id|>")
_STARTS = Markers(_TAG, "\n", *_ENDS)
_SEARCHED = Markers(*_STARTS.literals, "; {", ";{")  # a broken call may stand before the separator
_JSON = JsonReader(_TAG, *_ENDS, "\n{", "; {", ";{", line="{")


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    unmarked = CallRules(marked=False, accepts=lambda name: not tools or name in tools, accepts_bare=len(tools) > 0)
    marker = ""
    tagged = False
    while True:
        source.start_recording("" if marker == _TAG else marker)
        tagged = marker == _TAG
        space = yield from source.whitespace()
        while (yield from source.accept(_TAG)):
            tagged = True
            source.start_recording()
            yield from source.whitespace()
        rules = MARKED if tagged else unmarked
        while True:
            if (yield from _parse(source, out, rules)):
                space = _space_or_text(source.stop_recording(), out)
                yield from drop_left_over(source, _STARTS)
                source.start_recording()
                space += yield from source.whitespace()
            elif not (yield from source.ahead(";")):
                break
            separator = yield from source.accept(";", ",")
            space += yield from source.whitespace()
            if not separator and "\n" not in space:
                break
            rules = MARKED if tagged and separator else unmarked
        left = source.stop_recording()
        last = left[-1:]
        if not (tagged and not left.strip()):
            out.text(left)

        def emit(piece: str) -> None:
            nonlocal last
            last = piece[-1:]
            out.text(piece)

        marker = yield from source.until(_SEARCHED, emit)
        while marker in _ENDS or (marker == _TAG and last == "`"):
            if last == "`":
                out.text(marker)
            last = ""
            marker = yield from source.until(_SEARCHED, emit)
        if not marker:
            return
        if marker.startswith(";"):
            source.give_back(marker)
            marker = source.take(len(marker) - 1)


def _space_or_text(left: str, out: Emitter) -> str:
    """White space; what is none is text."""
    if not left.strip():
        return left
    out.text(left)
    return ""


def _parse(source: Source, out: Emitter, rules: CallRules) -> Steps[bool]:
    if rules is MARKED:
        return (yield from parse_calls(source, out, _JSON))
    return (yield from parse_call_object(source, out, rules, _JSON))


LLAMA3_JSON = ToolFamily("llama3_json", _script, frozenset([_TAG]), openers=(_TAG,))
