"""The value of an argument that stands between tags, as JSON.

A value stands in the text without quotes, so its type must come from elsewhere. Where the tool's schema says "string" it
is a string, streamed as it comes. Else it is held back until it ends: JSON of a type the schema allows (any type, if the
schema does not say) is taken as it is, Python's literals are understood, and all else is a string. A value
that no JSON value can begin like is known to be a string at its first character.
"""

from __future__ import annotations

import json

from sapwood_text.incremental.json_values import JsonReader, convert, json_text
from sapwood_text.incremental.source import Emit
from sapwood_text.tool_parser.tools import json_type

_STRING = frozenset(["string"])
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_STARTS = frozenset('{["-0123456789tfnTFN(')
_CONTAINERS = frozenset(["array", "object"])
_STRICT = JsonReader(python=True, words=False)
_LENIENT = JsonReader(python=True)


class Arguments:
    """Writes the arguments of one call as an object."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._opening = "{"

    def begin(self, key: str) -> None:
        """Write what stands before a value."""
        self._emit(f"{self._opening}{json_text(key)}: ")
        self._opening = ", "

    def write(self, piece: str) -> None:
        """Write more of a value."""
        self._emit(piece)

    def close(self) -> None:
        """End the object."""
        self._emit("{}" if self._opening == "{" else "}")


class TaggedValue:
    """Takes one value as it comes.

    Args:
        arguments: Where it is written.
        key: The argument's name.
        types: The types it may have; empty if unknown.
        trims_line: Whether one line break at its end is dropped.
    """

    def __init__(self, arguments: Arguments, key: str, types: frozenset[str], *, trims_line: bool) -> None:
        self._arguments = arguments
        self._key = key
        self._types = types
        self._trims_line = trims_line
        self._held: list[str] = []
        self._is_string: bool | None = True if types == _STRING else None
        self._line_break = ""
        self._begun = False

    @property
    def empty(self) -> bool:
        """Whether nothing of it has come."""
        return not self._begun and not self._held

    def feed(self, piece: str) -> None:
        """More of the value."""
        if not piece:
            return
        if self._is_string is None:
            self._is_string = piece[0] not in _JSON_STARTS and not piece[0].isspace()
        if self._is_string:
            self._stream(piece)
        else:
            self._held.append(piece)

    def end(self, *, whole: bool) -> None:
        """The value is over; if it is not ``whole``, the end of the text has cut it."""
        if self._is_string or self.empty:
            self._stream("")
            self._arguments.write('"')
            return
        text = "".join(self._held)
        value = _json_value(text.removesuffix("\n") if self._trims_line else text, self._types, whole=whole)
        if value is not None:
            self._arguments.begin(self._key)
            self._arguments.write(value)

    def _stream(self, piece: str) -> None:
        if not self._begun:
            self._arguments.begin(self._key)
            self._arguments.write('"')
            self._begun = True
        if self._trims_line:
            piece = self._line_break + piece
            self._line_break = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        self._arguments.write(json_text(piece)[1:-1])


def _json_value(text: str, types: frozenset[str], *, whole: bool) -> str | None:
    """The JSON for a value that is not known to be a string. None if it was cut before it was known."""
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _mended_value(text, bare, types, whole=whole)
    found = json_type(value)
    if not types or _matches(found, types):
        # Quotes around a string are part of it where strings are written without quotes.
        return json_text(text) if found == "string" and "string" in types else bare
    if isinstance(value, float) and "integer" in types and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if "string" in types:
        return json_text(text)
    if isinstance(value, str):
        inner = _json_value(value, types, whole=True)
        if inner is not None and inner[0] != '"':
            return inner
    return bare


def _mended_value(text: str, bare: str, types: frozenset[str], *, whole: bool) -> str | None:
    begins = bare[:1]
    is_container = begins in ("[", "{") or (begins == "(" and "array" in types)
    if is_container and (not types or types & _CONTAINERS):
        value, complete = convert(bare, _LENIENT if types or not whole else _STRICT)
        if value and (complete or not whole):
            return value
    if not whole and types and "string" not in types:
        return None
    return json_text(text)


def _matches(found: str, types: frozenset[str]) -> bool:
    return found in types or (found == "integer" and "number" in types)


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")
