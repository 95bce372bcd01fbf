"""Kimi K2: ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``.

Calls stand between ``<|tool_calls_section_begin|>`` and ``<|tool_calls_section_end|>``, which the models also write in the
singular. The model names each call itself, with the tool and a running number; the template wants that id back. The parts of
an id that is written otherwise are found by the tools on offer: ``functionsf5``, ``functions_f_1``. A number alone, or an id in
OpenAI's form, stands for the tool whose parameters fit the arguments.

Source: the tool-calling guide and the template published with the model.
"""

from __future__ import annotations

import json
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
)
from sapwood_text.tool_parser.tools import Tools

SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_MARKERS = CallMarkers.of(openers=(*SECTIONS, _CALL), closers=(_CALL_END, *_SECTION_ENDS), parts=(_ARGUMENTS,))
_ID = re.compile(r"[^\s<{\"]+")
_RIGHT_ID = re.compile(r"functions\.(.+):[0-9]+")
_LOOSE_ID = re.compile(r"(?:functions?[._:\-]?)?(.*?)[._:\-#]?([0-9]*)", re.IGNORECASE | re.DOTALL)
_FOREIGN_ID = re.compile(r"call[_\-]?\w*", re.IGNORECASE)


def _script(source: Source, out: Emitter, tools: Tools) -> Steps[None]:
    def attempt() -> Steps[bool]:
        call_id = yield from source.word(_ID, NAME_LIMIT)
        yield from source.whitespace()
        marked = False
        while (yield from source.accept(_ARGUMENTS)):
            marked = True
            yield from source.whitespace()
        if not marked and (not call_id or (yield from source.peek()) != "{"):
            return False
        name, number = _read_id(call_id, tools)
        if name:
            out.start_call(name, _call_id(call_id, name, number, out.calls))
            yield from copy_arguments(source, out, _MARKERS.json)
            return True
        held: list[str] = []
        whole = yield from _MARKERS.json.arguments(source, held.append)
        name, arguments = _fitting("".join(held), tools)
        name = name or call_id
        if not name:
            return False
        out.start_call(name, _call_id(call_id, name, number, out.calls))
        out.arguments(arguments)
        if not whole:
            out.note_cut()
        source.start_recording()
        return True

    yield from marked_calls(source, out, _MARKERS, attempt, ANYTHING)


def _read_id(call_id: str, tools: Tools) -> tuple[str, str]:
    """The tool that an id names, "" if it names none, and its number."""
    right = _RIGHT_ID.fullmatch(call_id)
    loose = _LOOSE_ID.fullmatch(call_id)
    assert loose, "the pattern matches any id"
    number = loose[2]
    plain = re.sub(r":[0-9]+$", "", call_id.removeprefix("functions."))
    if plain in tools or (right and not tools):
        return plain, number
    folded = call_id.lower()
    for name in sorted(tools, key=len, reverse=True):
        before, found, after = folded.rpartition(name.lower())
        if found and re.fullmatch(r"(functions?)?[._:\-]?", before) and re.fullmatch(r"[._:\-#]?[0-9]*", after):
            return name, re.sub(r"\D", "", after)
    if not loose[1] or (tools and _FOREIGN_ID.fullmatch(call_id)):
        return "", number
    # A tool that is not on offer.
    return (loose[1] if folded.startswith("functions") else plain), number


def _fitting(arguments: str, tools: Tools) -> tuple[str, str]:
    """The tool that the arguments name or fit, the first of those, with its arguments. "" if there is none."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return (next(iter(tools)) if len(tools) == 1 else ""), arguments
    named = given.get("name")
    if isinstance(named, str) and named in tools and not any(tools.fits(name, given.keys()) for name in tools):
        del given["name"]
        return named, json.dumps(given, ensure_ascii=False)
    fitting = [name for name in tools if tools.fits(name, given.keys())] or (list(tools) if len(tools) == 1 else [])
    return (fitting[0] if fitting else ""), arguments


def _call_id(call_id: str, name: str, number: str, index: int) -> str:
    return call_id if _RIGHT_ID.fullmatch(call_id) else f"functions.{name}:{int(number or index)}"


KIMI_K2 = ToolFamily("kimi_k2", _script, frozenset(_MARKERS.all.literals), openers=_MARKERS.openers.literals)
