"""Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`` and, from tokenizer v11 on, ``[TOOL_CALLS]f[ARGS]{...}``.

The newer form repeats ``[TOOL_CALLS]`` for each call; ``[CALL_ID]id`` may stand before ``[ARGS]``, and ``[ARGS]`` itself may
be missing. Ids are nine letters and digits, which the templates demand of the conversation that comes back.

Source: the documentation of mistral-common's tokenizers and the templates of Mistral 7B v0.3 and Mistral Small 3.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.json_scanner import copy_value
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, ToolFamily, short_id
from sapwood_tokenizer.output.tool_parser.call_object import parse_call_list, parse_call_object
from sapwood_tokenizer.output.tool_parser.tools import Tools

_CALLS = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_OPENERS = Markers(_CALLS)
_NAME = re.compile(r"[\w.\-:/]+")


def _script(source: Source, out: Emitter, _tools: Tools) -> Steps[None]:
    while (yield from source.until(_OPENERS, out.text)):
        source.start_recording(_CALLS)
        yield from source.whitespace()
        if (yield from source.accept("[")):
            yield from parse_call_list(source, out)
        elif (yield from source.peek()) == "{":
            yield from parse_call_object(source, out)
        else:
            yield from _parse_named(source, out)
        out.text(source.stop_recording())


def _parse_named(source: Source, out: Emitter) -> Steps[None]:
    """Read ``name[CALL_ID]id[ARGS]{...}``."""
    name = yield from source.word(_NAME, NAME_LIMIT)
    if not name:
        return
    call_id = ""
    yield from source.whitespace()
    marker = yield from source.accept(_CALL_ID, _ARGS)
    if marker == _CALL_ID:
        call_id = yield from source.word(_NAME, NAME_LIMIT)
        marker = yield from source.accept(_ARGS)
    yield from source.whitespace()
    if not marker and (yield from source.peek()) != "{":
        return
    out.start_call(name, call_id or None)
    source.stop_recording()
    yield from copy_value(source, out.arguments)


MISTRAL = ToolFamily("mistral", _script, frozenset([_CALLS, _ARGS, _CALL_ID]), make_id=short_id)
