"""Turns arguments that a model writes one by one between tags into a JSON object as they come.

A value stands in the text without quotes, so its type must come from elsewhere. Where the tool's schema says "string" it
is a string, streamed as it comes. Else it is held back until it ends: JSON of a type the schema allows (any type, if the
schema does not say) is taken as it is, Python's True, False and None are understood, and all else is a string. A value
that no JSON value can begin like is known to be a string at its first character.
"""

from __future__ import annotations

import json

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Emit, Source, Steps
from sapwood_tokenizer.output.tool_parser.python_literal import json_text
from sapwood_tokenizer.output.tool_parser.tools import json_type

_STRING = frozenset(["string"])
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_STARTS = frozenset('{["-0123456789tfnTFN')


class TaggedArguments:
    """Writes the arguments of the latest call.

    Args:
        source: The text with the values.
        out: Takes the arguments.
        end: The literal that ends a value.
        trims_line: Whether one line break at each end of a value is dropped.
    """

    def __init__(self, source: Source, out: Emitter, end: Markers, *, trims_line: bool) -> None:
        self._source = source
        self._out = out
        self._end = end
        self._trims_line = trims_line
        self._opening = "{"

    def copy(self, key: str, types: frozenset[str]) -> Steps[bool]:
        """Read the value of argument ``key`` and the tag after it. False if the text ended first.

        A value that is cut off is passed on as far as it came. The source records, and after it anew.
        """
        self._source.stop_recording()
        self._out.arguments(f"{self._opening}{json_text(key)}: ")
        self._opening = ", "
        if self._trims_line:
            yield from self._source.accept("\n")
        first = yield from self._source.peek()
        if types == _STRING or (first and first not in _JSON_STARTS and not first.isspace()):
            self._out.arguments('"')
            line = _LineTrimmer(lambda piece: self._out.arguments(json_text(piece)[1:-1]))
            emit: Emit = line if self._trims_line else line.emit
            whole = bool((yield from self._source.until(self._end, emit)))
            if whole:
                self._out.arguments('"')
                self._source.start_recording()
            return whole
        pieces: list[str] = []
        whole = bool((yield from self._source.until(self._end, pieces.append)))
        value = "".join(pieces)
        if whole:
            value = _json_value(value.removesuffix("\n") if self._trims_line else value, types)
            self._source.start_recording()
        self._out.arguments(value)
        return whole

    def close(self) -> None:
        """Ends the JSON object. What was recorded is part of the call."""
        self._out.arguments("{}" if self._opening == "{" else "}")
        self._source.start_recording()


class _LineTrimmer:
    """Passes text on without one line break at its end."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self._held = ""

    def __call__(self, piece: str) -> None:
        piece = self._held + piece
        self._held = "\n" if piece.endswith("\n") else ""
        self.emit(piece.removesuffix("\n"))


def _json_value(text: str, types: frozenset[str]) -> str:
    """The JSON for a value that is not known to be a string."""
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    try:
        found = json_type(json.loads(bare, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json_text(text)
    if not types:
        return bare
    if "string" in types:
        # Quotes around a string are part of it, since these formats write strings without quotes.
        return bare if found != "string" and _matches(found, types) else json_text(text)
    return bare


def _matches(found: str, types: frozenset[str]) -> bool:
    return found in types or (found == "integer" and "number" in types)


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")
