"""Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`` and, from tokenizer v11 on, ``[TOOL_CALLS]f[ARGS]{...}``.

The newer form repeats ``[TOOL_CALLS]`` for each call; ``[CALL_ID]id`` may stand before ``[ARGS]``, and ``[ARGS]`` itself may
be missing. Ids are nine letters and digits, which the templates demand of the conversation that comes back.

Source: the documentation of mistral-common's tokenizers and the templates of Mistral 7B v0.3 and Mistral Small 3.
"""

from __future__ import annotations

import re

from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Source, Steps
from sapwood_text.tool_parser.base import (
    ANYTHING,
    NAME_LIMIT,
    CallMarkers,
    ToolFamily,
    copy_arguments,
    marked_calls,
    short_id,
)
from sapwood_text.tool_parser.call_object import parse_calls
from sapwood_text.tool_parser.tools import Tools

_CALLS = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_MARKERS = CallMarkers.of(openers=(_CALLS,), closers=("[/TOOL_CALLS]",), parts=(_ARGS, _CALL_ID))
_NAME = re.compile(r"[\w.\-:/]+")


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        first = yield from source.peek()
        if first in "[{":
            return (yield from parse_calls(source, out, _MARKERS.json))
        return (yield from _parse_named(source, out, tools))

    yield from marked_calls(source, out, _MARKERS, attempt, ANYTHING)


def _parse_named(source: Source, out: Emitter, tools: Tools) -> Steps[bool]:
    """Read ``name[CALL_ID]id[ARGS]{...}``."""
    name = yield from source.word(_NAME, NAME_LIMIT)
    if not name:
        return False
    call_id = ""
    yield from source.whitespace()
    marker = ""
    while part := (yield from source.accept(_CALL_ID, _ARGS)):
        if part == _CALL_ID:
            call_id = yield from source.word(_NAME, NAME_LIMIT)
        marker = part
        yield from source.whitespace()
    first = yield from source.peek()
    if not marker and first != "{" and not (name in tools and (yield from _ends(source))):
        return False
    out.start_call(name, call_id or None)
    yield from copy_arguments(source, out, _MARKERS.json)
    return True


def _ends(source: Source) -> Steps[bool]:
    return (yield from source.at_end()) or bool((yield from source.ahead(_CALLS)))


MISTRAL = ToolFamily(
    "mistral", _script, frozenset(_MARKERS.all.literals), make_id=short_id, openers=_MARKERS.openers.literals
)
