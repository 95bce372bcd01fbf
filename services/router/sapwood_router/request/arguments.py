"""The arguments of calls in a history. Clients send back what a model wrote, also where it was cut short: that is nobody's fault.

Templates need a JSON object, so cut-off text is closed, and other values are wrapped in an object.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sapwood_common.contract.json_text import decode
from sapwood_common.errors import InvalidArgumentError

_TOKEN = re.compile(r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<mark>[{}\[\],:])|(?P<scalar>[^\s{}\[\],:"]+))', re.DOTALL)
_CUT_STRING = re.compile(r'\s*"(?:[^"\\]|\\.)*', re.DOTALL)
_CUT_ESCAPE = re.compile(
    r"(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{0,3})?|\\u[0-9a-fA-F]{0,3})\Z"
)
"""Part of an escape at the end of a text, or the first of two escapes that are one character."""
_CLOSERS = {"{": "}", "[": "]"}
_MOST_TOKENS, _DEEPEST = 20_000, 64
"""Tokens of JSON that are looked at, which takes 10 ms; and objects and lists within each other."""


def arguments_text(given: str | dict[str, Any] | None) -> str:
    """Arguments as text, whether a client sends them so or as an object."""
    if isinstance(given, dict):
        return msgspec.json.encode(given).decode()
    return given or ""


def whole_arguments(text: str) -> str:
    """A JSON object as text: the arguments as they are if they are one."""
    if not text.strip():
        return "{}"
    try:
        found = decode(text)
    except InvalidArgumentError:  # it is long, and the tokenizer reads it
        return text
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        closed = _closed(text)
        return msgspec.json.encode({"arguments": text}).decode() if closed is None else closed
    if isinstance(found, dict):
        return text
    if found is None:
        return "{}"
    if isinstance(found, str):  # encoded twice
        inner = whole_arguments(found) if found.lstrip().startswith("{") else None
        return inner or msgspec.json.encode({"arguments": found}).decode()
    return msgspec.json.encode({"arguments": found}).decode()


def _closed(text: str) -> str | None:
    """The object that a cut one begins with: its last value may be cut, a key without a value is left out. None: it begins none.

    O(characters).
    """
    stack: list[str] = []
    at = certain = 0
    ends = ""
    """What closes the object where all up to ``certain`` is in it."""
    wants_key = wants_value = goes_on = False
    for _ in range(_MOST_TOKENS):
        found = _TOKEN.match(text, at)
        if found is None:
            if wants_value and (cut := _CUT_STRING.match(text, at)):
                said = text[:at] + _CUT_ESCAPE.sub(r"\1", cut[0])
                return _checked(f'{said}"{_end(stack)}')
            break
        mark, at = found["mark"], found.end()
        if not stack and (mark != "{" or certain):
            break
        if mark in _CLOSERS:
            if (stack and not wants_value) or len(stack) >= _DEEPEST:
                break
            stack.append(mark)
            wants_key, wants_value = mark == "{", mark == "["
        elif mark in ("}", "]"):
            if goes_on or _CLOSERS[stack.pop()] != mark:
                break
            wants_key = wants_value = False
        elif mark == ",":
            wants_key, wants_value, goes_on = stack[-1] == "{", stack[-1] == "[", True
            continue
        elif mark == ":":
            wants_value = True
            continue
        elif wants_key:
            wants_key = False
            continue
        elif not wants_value or (found["scalar"] is not None and not _is_scalar(found["scalar"])):
            break
        else:
            wants_value = False
        goes_on = False
        certain, ends = at, _end(stack)
    return _checked(text[:certain] + ends)


def _checked(text: str) -> str | None:
    try:
        return text if isinstance(decode(text), dict) else None
    except (msgspec.DecodeError, RecursionError, UnicodeError, InvalidArgumentError):
        return None


def _end(stack: list[str]) -> str:
    return "".join(_CLOSERS[mark] for mark in reversed(stack))


def _is_scalar(text: str) -> bool:
    try:
        decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return False
    return True
