"""JSON as models write it, read as it arrives.

The scanner follows strings, escapes and brackets to find where a value ends; it does not check the value, since what a
model wrote must reach the client either way. Time is linear in the text. There is no recursion, so depth has no limit.

Where JSON is broken it gives up at the first ``<`` outside a string: no JSON has it there, and the tags of nearly all formats
begin with it. So a value that lacks its closing bracket ends before the closing tag.
"""

from __future__ import annotations

import re

from sapwood_tokenizer.output.incremental.source import Emit, Source, Steps

_PLAIN = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r"[A-Za-z0-9+\-.]+")
_STRING_RUN = re.compile(r'[^"\\]+')
_CODE_UNIT = re.compile(r"\\u([0-9a-fA-F]{4})")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def copy_value(source: Source, emit: Emit) -> Steps[bool]:
    """Stream one JSON value unchanged. False if it is broken, ends too early, or no value comes here."""
    first = yield from source.peek()
    if first == '"':
        return (yield from copy_string(source, emit))
    if first == "" or first not in "{[":
        scalar = False
        while (yield from source.more()) and (run := source.take_run(_SCALAR)):
            emit(run)
            scalar = True
        return scalar
    depth = 0
    while (yield from source.more()):
        if run := source.take_run(_PLAIN):
            emit(run)
            continue
        char = yield from source.peek()
        if char == "<":
            return False
        if char == '"':
            if not (yield from copy_string(source, emit)):
                return False
            continue
        emit(source.take(1))
        depth += 1 if char in "{[" else -1
        if depth == 0:
            return True
    return False


def copy_string(source: Source, emit: Emit) -> Steps[bool]:
    """Stream one JSON string unchanged, with its quotes. False if the text ends before it does.

    The source stands at the opening quote.
    """
    emit(source.take(1))
    while (yield from source.more()):
        if run := source.take_run(_STRING_RUN):
            emit(run)
        elif (yield from source.peek()) == "\\":
            emit(source.take(len((yield from source.peek(2)))))
        else:
            emit(source.take(1))
            return True
    return False


def decode_string(source: Source, emit: Emit) -> Steps[bool]:
    """Stream the decoded content of one JSON string. False if the text ends before it does.

    The source stands at the opening quote. An unknown or incomplete escape is kept as it is written; half a surrogate
    pair becomes U+FFFD.
    """
    source.take(1)
    while piece := (yield from _decoded_piece(source)):
        emit(piece)
    return piece is not None


def read_string(source: Source, limit: int) -> Steps[str | None]:
    """Read and decode one short JSON string. None if no string comes here, or it is cut, or longer than ``limit``."""
    if not (yield from source.accept('"')):
        return None
    pieces: list[str] = []
    size = 0
    while piece := (yield from _decoded_piece(source, limit)):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            return None
    return "".join(pieces) if piece is not None else None


def _decoded_piece(source: Source, limit: int | None = None) -> Steps[str | None]:
    """The next piece of a string, "" after its closing quote, None at the end of the text.

    With ``limit`` it reads at most one character more than that, wherever the text is cut.
    """
    if limit is None:
        if not (yield from source.more()):
            return None
        run = source.take_run(_STRING_RUN)
    else:
        run = yield from source.word(_STRING_RUN, limit + 1)
    if run:
        return run
    char = yield from source.peek()
    if char == "\\":
        return (yield from _decoded_escape(source))
    return "" if source.take(1) else None


def _decoded_escape(source: Source) -> Steps[str | None]:
    escape = yield from source.peek(2)
    if escape != "\\u":
        source.take(len(escape))
        return _ESCAPES.get(escape[1:], escape)
    unit = _code_unit((yield from source.peek(6)))
    if unit is None:
        return source.take(2)
    if 0xD800 <= unit < 0xDC00:
        low = _code_unit((yield from source.peek(12))[6:])
        if low is not None and 0xDC00 <= low < 0xE000:
            source.take(12)
            return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
    source.take(6)
    return "\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit)


def _code_unit(escape: str) -> int | None:
    match = _CODE_UNIT.fullmatch(escape)
    return int(match.group(1), 16) if match else None
