"""JSON as models write it, read as it arrives and written as JSON that is right.

Valid JSON is copied byte for byte. Errors are repaired by these rules, so that every value that was begun ends as JSON:

* An element is written once its value begins: a key without a value and a comma without an element are dropped.
* A missing comma is added. A bracket that is still open when an outer one is closed is closed before it. A closing bracket
  that closes nothing is dropped.
* Strings may stand between single quotes. Control characters are escaped. A backslash that begins no escape is a backslash.
* Keys may lack quotes. Python's words (True, None), tuples and numbers are understood; any other word is a string.
* The value ends where the text ends, at a word that can be no element, at a ``<`` outside a string, and at one of the format's
  markers. A marker inside a string ends it only if the string is not closed: its next quote is not followed by a comma, a
  colon or a closing bracket.

Time is linear in the text. There is no recursion, so depth has no limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from sapwood_text.incremental.source import Emit, Markers, Source, Steps

_SCALAR = re.compile(r"[^\s,:;=<\"'\[\](){}]+")
_SCALAR_LIMIT = 1024
_HEAD_LIMIT = 640
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BARE_KEY = re.compile(r"[\w.$\-]+")
_CONTROL = re.compile(r"[\x00-\x1f]")
_HEX = re.compile(r"[0-9a-fA-F]+")
_SIMPLE = frozenset('"\\/bfnrt')
_SHORT_RUN = re.compile(r"[^\"'\\<\[;\n]+")
_PYTHON = {"a": "\\u0007", "v": "\\u000b", "\n": ""}
_NUMBERED = {"x": 2, "u": 4, "U": 8}
# An open bracket is written as the character that closes it and the one that is written then.
_OPENED = {"{": "}}", "[": "]]", "(": ")]"}
KEYWORDS = ")}"
"""Keyword arguments behind an opening parenthesis, which become an object."""
_ENCODED_DEPTH = 3


json_text: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode
"""A value as a JSON string."""


class JsonReader:
    """Reads the values of one format.

    Args:
        ends: The format's markers, which end a value that is not closed.
        quote: A marker that quotes strings, which then have no escapes.
        python: Whether strings have Python's escapes and may stand between three quotes.
        line: What the next call begins with, on a line of its own, in a format without markers: an object with a name
            (``{``) or a list of Python calls (``[``). It ends a value that is not closed.
        words: Whether a word that is neither Python's nor JSON's is a string; else it can be no element.
        head: What a call begins with up to one of its strings, in a format that may have no other quotes before. A quote
            behind it opens a string of the next call, and closes none.
    """

    def __init__(
        self,
        *ends: str,
        quote: str = "",
        line: str = "",
        python: bool = False,
        words: bool = True,
        head: re.Pattern[str] | None = None,
    ) -> None:
        self._ends = ends
        self._first = frozenset(end[0] for end in ends)
        self._stop_chars = self._first | {"<"}
        self._quote = quote
        self._line = line
        self._python = python
        self._words = words
        self._head = head
        self._closing: dict[str, Markers] = {}
        self._stopping: dict[str, Markers] = {}
        for mark in ('"', "'", quote):
            if mark:
                closing = (mark,) if mark == quote else (mark, "\\")
                self._closing[mark] = Markers(*closing)
                self._stopping[mark] = Markers(*closing, *ends)
        self._bare_ends = Markers(quote, ",", "}", "]", ")", *ends) if quote else None

    def arguments(self, source: Source, emit: Emit, encoded: int = _ENCODED_DEPTH) -> Steps[bool]:
        """Stream the arguments of a call. False if they were cut.

        Arguments in a string are what the string says. Nothing and ``null`` are ``{}``.
        """
        yield from source.whitespace()
        mark = yield from self._quote_ahead(source)
        if mark and encoded:
            source.take(len(mark))
            inner = _Decoded(emit, encoded - 1)
            whole = yield from self._content(source, inner.feed, mark)
            inner.finish()
            return whole
        if (yield from source.accept("null")):
            emit("{}")
            return True
        written = False

        def note(piece: str) -> None:
            nonlocal written
            written = True
            emit(piece)

        whole = yield from self.value(source, note)
        if not written:
            emit("{}")
        return whole

    def value(self, source: Source, emit: Emit, opened: str = "") -> Steps[bool]:
        """Stream one value. False if it is not closed, or none comes here; nothing is written in the latter case.

        Args:
            source: Stands before the value.
            emit: Takes it.
            opened: KEYWORDS if the opening parenthesis was read, and ``{`` was written for it.
        """
        brackets = [opened] if opened else []  # the open ones, innermost last
        filled = [False] if opened else []  # whether they hold an element
        held = ""  # read, and written if an element follows
        stop_chars, line = self._stop_chars, self._line
        while True:
            if line and brackets and (yield from self.next_call(source)):
                break
            char = source.come() or (yield from source.peek())
            if char.isspace():
                space = source.come_space()
                held += (yield from source.whitespace()) if space is None else space
                char = source.come() or (yield from source.peek())
            if (char in stop_chars or char == "") and (yield from self._stops(source)):
                break
            if char in ")]}":
                if not brackets:
                    return False
                source.take(1)
                if brackets[-1][0] != char and not any(bracket[0] == char for bracket in brackets[-64:]):
                    continue
                emit("" if held.strip() else held)
                held = ""
                closed = ""
                while closed != char:
                    bracket = brackets.pop()
                    filled.pop()
                    emit(bracket[1])
                    closed = bracket[0]
                if not brackets:
                    return True
                continue
            if char in ",:;=" and brackets:
                source.take(1)
                if char == "," and filled[-1] and not held.strip():
                    held += ","
                continue
            if brackets and brackets[-1][1] == "}":
                if char == "{" and not filled[-1]:  # a doubled bracket
                    source.take(1)
                    continue
                key = yield from self._key(source)
                if key is None:
                    break
                if self._line and (yield from self.next_call(source)):
                    break
                held = _separated(held, filled) + key
                char = source.come() or (yield from source.peek())
                if char.isspace():
                    held += yield from source.whitespace()
                    char = yield from source.peek()
                if char != ":" and char != "=":
                    held = ""
                    continue
                colon = source.take(1)
                if self._line and (yield from self.next_call(source)):
                    break
                held += ":" if colon == ":" else ": "
                char = source.come() or (yield from source.peek())
                if char.isspace():
                    space = source.come_space()
                    held += (yield from source.whitespace()) if space is None else space
                    char = source.come() or (yield from source.peek())
                if (char in stop_chars or char == "") and (yield from self._stops(source)):
                    break
                if char in ")]},":
                    held = ""
                    continue
            elif brackets:
                held = _separated(held, filled)
            if char in _OPENED:
                source.take(1)
                emit(held + ("{" if char == "{" else "["))
                if filled:
                    filled[-1] = True
                brackets.append(_OPENED[char])
                filled.append(False)
                held = ""
                continue
            mark = char if char == '"' else (yield from self._quote_ahead(source))
            if mark:
                source.take(len(mark))
                emit(held + '"')
                whole = yield from self._content(source, emit, mark)
                emit('"')
                if not whole:
                    break
            else:
                scalar = yield from self._scalar(source, in_object=bool(brackets) and brackets[-1][1] == "}")
                if scalar is None:
                    break
                emit(held + scalar)
            held = ""
            if not brackets:
                return True
            filled[-1] = True
        for bracket in reversed(brackets):
            emit(bracket[1])
        return False

    def short_string(self, source: Source, limit: int) -> Steps[str | None]:
        """Read and decode a string on one line. None if none comes here, or it is cut, or longer than ``limit``."""
        mark = yield from self._quote_ahead(source)
        if not mark:
            return None
        source.take(len(mark))
        pieces: list[str] = []
        left = limit
        while True:
            run = yield from source.word(_SHORT_RUN, left + 1)
            pieces.append(_escaped(run, mark))
            left -= len(run)
            if left < 0 or (yield from self._at_end_mark(source)):
                return None
            if (yield from source.accept(mark)):
                break
            char = yield from source.peek()
            if char in ("", "\n"):
                return None
            source.take(1)
            pieces.append((yield from self._escape(source)) if char == "\\" else _escaped(char, mark))
            left -= 1
        return str(json.loads(f'"{"".join(pieces)}"'))

    def _at_end_mark(self, source: Source) -> Steps[bool]:
        char = yield from source.peek()
        return char in self._first and bool((yield from source.ahead(*self._ends)))

    def _stops(self, source: Source) -> Steps[bool]:
        """Whether no value can continue here."""
        char = yield from source.peek()
        if char == "" or (yield from self._at_end_mark(source)):
            return True
        return char == "<" and not (self._quote and (yield from source.ahead(self._quote)))

    def next_call(self, source: Source) -> Steps[bool]:
        """Whether the next line begins a call, in a format without markers."""
        if not self._line or not (source.come() or (yield from source.peek())).isspace():
            return False
        space = source.space_ahead()
        if space is not None and not space.endswith("\n"):
            return False
        source.open_probe()
        space = yield from source.whitespace()
        found = space.endswith("\n") and bool((yield from source.accept(self._line)))
        if found:
            yield from source.whitespace()
            if self._line == "{":
                found = bool((yield from source.accept('"name"')))
            else:
                found = bool((yield from source.word(_BARE_KEY, _SCALAR_LIMIT)) and (yield from source.accept("(")))
        source.rewind()
        return found

    def _quote_ahead(self, source: Source) -> Steps[str]:
        if self._quote and (yield from source.ahead(self._quote)):
            return self._quote
        char = source.come() or (yield from source.peek())
        return char if char in ('"', "'") else ""

    def _key(self, source: Source) -> Steps[str | None]:
        """Read a key; return it as JSON. None if none comes here, or it is cut."""
        mark = yield from self._quote_ahead(source)
        if not mark:
            source.open_probe()
            word = yield from source.word(_BARE_KEY, _SCALAR_LIMIT)
            yield from source.whitespace()
            if not word or not (yield from source.ahead(":", "=")):
                source.rewind()
                return None
            source.close_probe()
            return json_text(word)
        source.take(len(mark))
        pieces: list[str] = []
        whole = yield from self._content(source, pieces.append, mark)
        return f'"{"".join(pieces)}"' if whole else None

    def _scalar(self, source: Source, *, in_object: bool) -> Steps[str | None]:
        """Read a number or a word; return it as JSON. None if none comes here, or it is cut."""
        if self._bare_ends:
            return (yield from self._bare(source, self._bare_ends, in_object=in_object))
        word = yield from source.word(_SCALAR, _SCALAR_LIMIT)
        if not word:
            return None
        if (yield from source.at_end()) and word not in _WORDS:
            number = _NUMBER.match(word)
            return number.group() if number else None
        scalar = _json_scalar(word)
        return scalar if self._words or scalar[0] != '"' else None

    def _bare(self, source: Source, ends: Markers, *, in_object: bool) -> Steps[str | None]:
        """Read a value without quotes, or with a closing one alone."""
        pieces: list[str] = []
        while True:
            end = yield from source.until(ends, pieces.append)
            if end == self._quote:
                return json_text("".join(pieces))
            if end == "":
                word = "".join(pieces).strip()
                number = _NUMBER.fullmatch(word)
                return number.group() if number else _WORDS.get(word)
            source.give_back(end)
            if end != "," or not in_object or (yield from self._key_follows(source)):
                break
            pieces.append(source.take(1))
        word = "".join(pieces).strip()
        return _json_scalar(word) if word else None

    def _key_follows(self, source: Source) -> Steps[bool]:
        """Whether a key stands behind the comma that comes next."""
        source.open_probe()
        source.take(1)
        yield from source.whitespace()
        if (yield from source.accept(self._quote)):
            found = True
        else:
            word = yield from source.word(_BARE_KEY, _SCALAR_LIMIT)
            yield from source.whitespace()
            found = bool(word) and bool((yield from source.accept(":")))
        source.rewind()
        return found

    def _content(self, source: Source, emit: Emit, mark: str) -> Steps[bool]:
        """Stream a string's content as JSON, from after its opening mark to its closing one. False if it is not closed."""
        triple = self._python and (yield from source.accept(mark * 2))
        stops, closing = self._stopping[mark], self._closing[mark]

        def write(piece: str) -> None:
            emit(_CONTROL.sub(_json_control, piece) if mark == '"' else _escaped(piece, mark))

        while True:
            stop = yield from source.until(stops, write)
            if stop == "":
                return False
            if stop == "\\" and not (self._python and stops is not closing and (yield from self._at_end_mark(source))):
                emit((yield from self._escape(source)))
            elif stop != mark:
                if stop != "\\":  # a backslash before an end continues the line, if the string continues
                    source.give_back(stop)
                if not (yield from self._is_closed(source, mark)):
                    return False
                if stop == "\\":
                    emit((yield from self._escape(source)))
                stops = closing
            elif mark == self._quote and not (yield from self._closes(source)):
                emit('\\"')
            elif not triple or (yield from source.accept(mark * 2)):
                return True
            else:
                emit('\\"' if mark == '"' else mark)

    def _closes(self, source: Source) -> Steps[bool]:
        """Whether the format's own quote, which was read, closes a string: it also stands for a quote inside one."""
        source.open_probe()
        yield from source.whitespace()
        after = yield from source.peek()
        if after == ")":
            source.take(1)
            yield from source.whitespace()
        closes = (
            after in ("}", "]", ":") or (yield from source.at_end()) or bool((yield from source.ahead(*self._ends)))
        )
        if after == ",":
            source.take(1)
            yield from source.whitespace()
            after = yield from source.peek()
            word = yield from source.word(_BARE_KEY, _SCALAR_LIMIT)
            yield from source.whitespace()
            closes = (
                (after in '{["' or bool((yield from source.ahead(self._quote))))
                if not word
                else word in _WORDS
                or bool(_NUMBER.fullmatch(word))
                or (yield from source.peek()) in ":="
                or (yield from self._at_end_mark(source))
            )
        source.rewind()
        return closes

    def _is_closed(self, source: Source, mark: str) -> Steps[bool]:
        """Whether the string that the source stands in has a closing quote."""
        source.open_probe()
        stop = "\\"
        before = ""

        def keep(piece: str) -> None:
            nonlocal before
            before = (before + piece)[-_HEAD_LIMIT:]

        while stop == "\\":
            stop = yield from source.until(self._closing[mark], keep)
            if stop == "\\":
                keep(source.take(len((yield from source.peek()))))
        if self._head and self._head.search(before):
            stop = ""
        yield from source.whitespace()
        after = yield from source.peek()
        source.rewind()
        return stop != "" and (after == "" or after in ",:=}])")

    def _escape(self, source: Source) -> Steps[str]:
        """Read an escape after its backslash; return it as JSON writes it."""
        kind = yield from source.peek()
        if kind in _SIMPLE and kind:
            return "\\" + source.take(1)
        if kind == "'":
            return source.take(1)
        size = _NUMBERED.get(kind, 0) if self._python or kind == "u" else 0
        if size:
            digits = (yield from source.peek(1 + size))[1:]
            if len(digits) == size and _HEX.fullmatch(digits) and (code := int(digits, 16)) <= 0x10FFFF:
                source.take(1 + size)
                if kind == "u" and 0xD800 <= code < 0xE000:
                    return (yield from self._surrogate(source, digits, code))
                return f"\\u{digits}" if kind == "u" else json_text(chr(code))[1:-1]
        if self._python and kind in _PYTHON:
            source.take(1)
            return _PYTHON[kind]
        return "\\\\" if kind else ""

    def _surrogate(self, source: Source, digits: str, code: int) -> Steps[str]:
        """Read the other half of a surrogate pair, if it follows. Half a pair is U+FFFD."""
        following = yield from source.peek(6)
        low = following[2:] if following.startswith("\\u") and len(following) == 6 else ""
        if code < 0xDC00 and low and _HEX.fullmatch(low) and 0xDC00 <= int(low, 16) < 0xE000:
            return f"\\u{digits}" + source.take(6)
        return "\\ufffd"


class _Decoded:
    """Reads the arguments that a string holds, as the string arrives in JSON's form."""

    def __init__(self, emit: Emit, encoded: int) -> None:
        self._source = Source()
        self._steps = _decoded_arguments(self._source, emit, encoded)
        self._ended = False
        self._advance()

    def feed(self, fragment: str) -> None:
        text = str(json.loads(f'"{fragment}"'))
        if text and not self._ended:
            self._source.feed(text)
            self._advance()

    def finish(self) -> None:
        self._source.close()
        self._advance()

    def _advance(self) -> None:
        if self._ended:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._ended = True


def _decoded_arguments(source: Source, emit: Emit, encoded: int) -> Steps[None]:
    space = yield from source.whitespace()
    first = yield from source.peek()
    if first == "" or (yield from source.peek(5)) == "null":
        emit("{}")
    elif first in "{[" or (first == '"' and encoded):
        yield from _PLAIN.arguments(source, emit, encoded)
    else:
        emit('"' + json_text(space)[1:-1])
        yield from source.rest(lambda piece: emit(json_text(piece)[1:-1]))
        emit('"')


_PLAIN = JsonReader()


def convert(text: str, reader: JsonReader) -> tuple[str, bool]:
    """A whole value as JSON, and whether it was a whole value and nothing else."""
    source = Source()
    source.feed(text)
    source.close()
    pieces: list[str] = []

    def read() -> Steps[bool]:
        whole = yield from reader.value(source, pieces.append)
        yield from source.whitespace()
        return whole and (yield from source.at_end())

    try:
        next(read())
    except StopIteration as end:
        return "".join(pieces), bool(end.value)
    raise AssertionError("nothing waits where the text has ended")


def _separated(held: str, filled: list[bool]) -> str:
    """The white space and the comma before an element."""
    return held if not filled[-1] or held.strip() else "," + (held or " ")


def _json_scalar(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))  # 0x10, 1_000
    except ValueError:
        return json_text(word)


def _escaped(piece: str, mark: str) -> str:
    """Text between a string's escapes, as JSON writes it."""
    if mark == '"':
        return _CONTROL.sub(_json_control, piece)
    return json_text(piece)[1:-1]


def _json_control(match: re.Match[str]) -> str:
    return json_text(match.group())[1:-1]


def _drop(_piece: str) -> None:
    pass
