"""One call written as a JSON object, or a list of such: ``{"name": "f", "arguments": {...}}``.

Keys may come in any order; "parameters" is another name for "arguments", "tool_name" and "function" for "name"; other keys are
left out. A call may stand in an object under "function", as OpenAI's do.
Arguments that come before the name are held back until it is known. Arguments written as a JSON string stand for what the
string says; ``null``, "" and no arguments at all are ``{}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_text.incremental.json_values import JsonReader
from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Source, Steps
from sapwood_text.tool_parser.base import NAME_LIMIT, copy_arguments, start_call

_PLAIN = JsonReader()
_SEPARATORS = re.compile(r"[\s,;}]+")


@dataclass(frozen=True, slots=True)
class CallRules:
    """When an object is a call.

    Attributes:
        marked: Whether something before the object says that it is a call. Then a name is enough; else the object must also
            have arguments that are an object, or a string that holds one.
        accepts: Whether a tool of this name can be called.
        accepts_bare: Whether a name alone, without arguments, is a call when nothing marks it.
    """

    marked: bool
    accepts: Callable[[str], bool]
    accepts_bare: bool


MARKED = CallRules(marked=True, accepts=lambda _name: True, accepts_bare=True)
"""The rules of formats that mark calls."""


def parse_call_object(
    source: Source, out: Emitter, rules: CallRules = MARKED, json: JsonReader = _PLAIN
) -> Steps[bool]:
    """Read one call object. Returns whether a call was started.

    The source records. The record then holds what is not part of a call: everything if no call was started; the rest of
    the object from the fault on if it is broken.
    """
    before = out.calls
    wrote = yield from _parse(source, out, rules, json)
    started = out.calls > before
    if started and not wrote:
        out.arguments("{}")
    return started


def _parse(source: Source, out: Emitter, rules: CallRules, json: JsonReader) -> Steps[bool]:
    """Read one call object. Returns whether arguments were written."""
    if not (yield from source.accept("{")):
        return False
    name: str | None = None
    started = False
    early: list[str] = []  # arguments that came before the name
    has_arguments = wrote = False
    while not (yield from json.next_call(source)):
        yield from source.whitespace()
        key = yield from json.short_string(source, NAME_LIMIT)
        if key is None:
            break
        if (yield from json.next_call(source)):
            break
        yield from source.whitespace()
        if not (yield from source.accept(":")) or (yield from json.next_call(source)):
            break
        yield from source.whitespace()
        if key == "function" and name is None and (yield from source.accept("{")):
            continue  # the call is in an object of its own, whose bracket is left over at the end
        if key in ("name", "tool_name", "function") and name is None:
            name = yield from json.short_string(source, NAME_LIMIT)
            if not name or not rules.accepts(name):
                return False
            if rules.marked or has_arguments:
                start_call(source, out, name)
                started = True
                out.arguments("".join(early))
                wrote = has_arguments
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            if not rules.marked and not (yield from _holds_object(source)):
                return False
            if name is None:
                yield from json.arguments(source, early.append)
            else:
                if not started:
                    out.start_call(name)
                    started = True
                wrote = True
                yield from copy_arguments(source, out, json)
        elif not (yield from json.value(source, _leave_out)):
            break
        if (yield from json.next_call(source)):
            break
        yield from source.whitespace()
        separator = yield from source.accept(",", "}")
        if separator == "}":
            if name is not None and not started and (rules.marked or rules.accepts_bare):
                start_call(source, out, name)
                started = True
            if started:
                source.start_recording()
            return wrote
        if not separator:
            break
    if started and (yield from source.at_end()):
        if not wrote:
            out.note_cut()
        source.start_recording()
    return wrote


def parse_calls(source: Source, out: Emitter, json: JsonReader = _PLAIN) -> Steps[bool]:
    """Read one call object, or a list of them. Returns whether a call was started.

    The source records; the record then holds what is not part of a call. An object in a list that is no call is left out.
    """
    if not (yield from source.accept("[")):
        return (yield from parse_call_object(source, out, json=json))
    before = out.calls
    while True:
        yield from source.word(_SEPARATORS, NAME_LIMIT)
        if (yield from source.accept("]")):
            break
        if (yield from source.peek()) != "{":
            return out.calls > before
        source.open_probe()
        if (yield from parse_call_object(source, out, json=json)):
            source.close_probe()
            continue
        source.rewind()
        if not (yield from json.value(source, _leave_out)):
            return out.calls > before
        if out.calls > before:
            source.start_recording()
    if out.calls > before:
        source.start_recording()
        return True
    return False


def _holds_object(source: Source) -> Steps[bool]:
    return (yield from source.peek()) == "{" or (yield from source.peek(2)) == '"{'


def _leave_out(_piece: str) -> None:
    pass
