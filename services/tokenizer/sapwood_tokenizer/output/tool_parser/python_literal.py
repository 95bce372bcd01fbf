"""Converts Python literals to JSON as they arrive.

Lists, tuples (as arrays), dicts, strings, numbers, True, False, None; also JSON's true, false and null. Bare words and
numbers that JSON does not have become strings. Keys of dicts become strings. There is no recursion, so depth has no limit;
strings are streamed, other scalars (at most ``_SCALAR_LIMIT`` characters) come whole.
"""

from __future__ import annotations

import json
import re

from sapwood_tokenizer.output.incremental.source import Emit, Source, Steps

_SCALAR = re.compile(r"[\w.+\-]+")
_SCALAR_LIMIT = 256
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_RUNS = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_NUMBERED = {"x": 4, "u": 6, "U": 10}
_HEX = re.compile(r"[0-9a-fA-F]+")


def json_text(value: str) -> str:
    """``value`` as a JSON string."""
    return json.dumps(value, ensure_ascii=False)


def copy_literal(source: Source, emit: Emit) -> Steps[bool]:
    """Stream one Python literal as JSON. False if it is broken, ends too early, or none comes here."""
    closers: list[str] = []  # of the open brackets, innermost last
    separator = ""  # held back, since Python allows a comma before the closing bracket
    at_key = False
    while True:
        yield from source.whitespace()
        char = yield from source.peek()
        if char == "":
            return False
        if closers and char == closers[-1]:
            source.take(1)
            closers.pop()
            emit("}" if char == "}" else "]")
        elif char in _CLOSERS:
            if at_key:
                return False
            source.take(1)
            closers.append(_CLOSERS[char])
            emit(separator + ("{" if char == "{" else "["))
            separator = ""
            at_key = char == "{"
            continue
        elif char in _RUNS:
            emit(separator)
            if not (yield from _copy_string(source, char, emit)):
                return False
        else:
            word = yield from source.word(_SCALAR, _SCALAR_LIMIT)
            if not word:
                return False
            emit(separator + (json_text(word) if at_key else _scalar(word)))
        separator = ""
        at_key = False
        if not closers:
            return True
        yield from source.whitespace()
        mark = yield from source.accept(",", ":") if closers[-1] == "}" else source.accept(",")
        if mark:
            separator = mark + " "
            at_key = mark == "," and closers[-1] == "}"
        elif (yield from source.peek()) != closers[-1]:
            return False


def _scalar(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))  # 0x10, 1_000
    except ValueError:
        return json_text(word)


def _copy_string(source: Source, quote: str, emit: Emit) -> Steps[bool]:
    """Stream a quoted string as a JSON string. Line breaks are taken as they are."""
    triple = (yield from source.peek(3)) == quote * 3
    source.take(3 if triple else 1)
    emit('"')
    while (yield from source.more()):
        if run := source.take_run(_RUNS[quote]):
            emit(json_text(run)[1:-1])
        elif (yield from source.peek()) == "\\":
            emit((yield from _escape(source)))
        elif not triple or (yield from source.peek(3)) == quote * 3:
            source.take(3 if triple else 1)
            emit('"')
            return True
        else:
            emit(json_text(source.take(1))[1:-1])
    return False


def _escape(source: Source) -> Steps[str]:
    """Read an escape; return it as JSON writes it. An unknown one is kept as it is written."""
    escape = yield from source.peek(2)
    kind = escape[1:]
    if kind in _NUMBERED:
        size = _NUMBERED[kind]
        digits = (yield from source.peek(size))[2:]
        if len(digits) == size - 2 and _HEX.fullmatch(digits) and (code := int(digits, 16)) <= 0x10FFFF:
            source.take(size)
            # Half a surrogate pair stays an escape: the other half may follow.
            return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else json_text(chr(code))[1:-1]
    source.take(len(escape))
    if kind == "\n":
        return ""
    return json_text(_ESCAPES.get(kind, escape))[1:-1]
