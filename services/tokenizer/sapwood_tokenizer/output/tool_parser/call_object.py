"""One call written as a JSON object, or a list of such: ``{"name": "f", "arguments": {...}}``.

Keys may come in any order; "parameters" is another name for "arguments", and "tool_name" for "name"; other keys are left out.
Arguments that come before the name are held back until it is known. Arguments written as a JSON string stand for what the
string says; ``null`` and no arguments at all are ``{}``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.json_scanner import copy_value, decode_string, read_string
from sapwood_tokenizer.output.incremental.source import Emit, Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, start_call


@dataclass(frozen=True, slots=True)
class CallRules:
    """When an object is a call.

    Attributes:
        marked: Whether something before the object says that it is a call. Then a name is enough; else the object must also
            have arguments that are an object.
        accepts: Whether a tool of this name can be called.
        accepts_bare: Whether a name alone, without arguments, is a call when nothing marks it.
    """

    marked: bool
    accepts: Callable[[str], bool]
    accepts_bare: bool


MARKED = CallRules(marked=True, accepts=lambda _name: True, accepts_bare=True)
"""The rules of formats that mark calls."""


def parse_call_object(source: Source, out: Emitter, rules: CallRules = MARKED) -> Steps[bool]:
    """Read one call object. Returns whether a call was started.

    The source records. The record then holds what is not part of a call: everything if no call was started; the rest of
    the object from the fault on if it is broken.
    """
    if not (yield from source.accept("{")):
        return False
    name: str | None = None
    started = False
    early: list[str] | None = None  # arguments that came before the name
    has_arguments = False
    while True:
        yield from source.whitespace()
        key = yield from read_string(source, NAME_LIMIT)
        if key is None:
            return started
        yield from source.whitespace()
        if not (yield from source.accept(":")):
            return started
        yield from source.whitespace()
        if key in ("name", "tool_name") and name is None:
            name = yield from read_string(source, NAME_LIMIT)
            if not name or not rules.accepts(name):
                return False
            if rules.marked or early is not None:
                start_call(source, out, name)
                started = True
                out.arguments("".join(early or ()))
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            if not rules.marked and (yield from source.peek()) != "{":
                return False
            if name is None:
                early = []
                if not (yield from _copy_arguments(source, early.append)):
                    return False
            else:
                if not started:
                    out.start_call(name)
                    started = True
                source.stop_recording()
                whole = yield from _copy_arguments(source, out.arguments)
                source.start_recording()
                if not whole:
                    return True
        elif not (yield from copy_value(source, _leave_out)):
            return started
        yield from source.whitespace()
        separator = yield from source.accept(",", "}")
        if separator == "}":
            break
        if not separator:
            return started
    if name is None or (not started and not rules.accepts_bare):
        return False
    if not started:
        start_call(source, out, name)
    if not has_arguments:
        out.arguments("{}")
    source.start_recording()
    return True


def parse_call_list(source: Source, out: Emitter) -> Steps[bool]:
    """Read calls from after the opening bracket of a list to the closing one. Returns whether one was started.

    The source records; the record then holds what is not part of a call.
    """
    started = False
    separator = ","
    while separator == ",":
        yield from source.whitespace()
        if not (yield from parse_call_object(source, out)):
            return started
        started = True
        yield from source.whitespace()
        separator = yield from source.accept(",", "]")
    if separator == "]":
        source.start_recording()
    return True


def _copy_arguments(source: Source, emit: Emit) -> Steps[bool]:
    first = yield from source.peek()
    if first == '"':
        return (yield from decode_string(source, emit))
    if first != "n":
        return (yield from copy_value(source, emit))
    word: list[str] = []
    yield from copy_value(source, word.append)
    text = "".join(word)
    emit("{}" if text == "null" else text)
    return True


def _leave_out(_piece: str) -> None:
    pass
