"""Request bodies: parsed, and checked, with an error that names the parameter at fault."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from sapwood_common.errors import InvalidArgumentError

Neutral = Mapping[str, tuple[Any, ...]]
"""Parameters, each with the values that ask for nothing, beside null."""

_MOST_STRINGS, _MOST_NESTED, _MOST_VALUES = 65_536, 16_384, 1_310_720
"""The most strings of a body, keys included, the most arrays and objects together, and the most values in all. Without these
bounds a body of 16 MB would keep the event loop for half a second, and then whoever checks what is in it; it would take 400 MB.
"""
_MOST_SIGNS, _MOST_ESCAPES = 262_144, 1_048_576
"""The most pairs of quotes, and brackets, those in texts counted: a text with as many is longer than any context. And the most
backslashes where texts have to be told from the rest.
"""
_COUNTED_AT_ONCE = 64 * 1024
_NO_SIGNS = bytes(sign for sign in range(256) if sign not in b',"[{')
"""Counting signs among signs takes less than half of the time that counting them in all of a text does."""
_MOST_EXPLAINED = 1024 * 1024
"""In bodies of up to so many bytes the parameter with bad Unicode is named."""

StructT = TypeVar("StructT", bound=msgspec.Struct)

_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InvalidArgumentError: It has far too many values, is not JSON, not Unicode (the parameter is named), or not an object.
    """
    _check_size(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain(body, error) from error
    except RecursionError as error:
        raise InvalidArgumentError("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    return value


def _check_size(body: bytes) -> None:
    """Refuses bodies with too many values. What stands in texts does not count, unless that alone is too much."""
    if len(body) < 2 * _MOST_NESTED:
        return
    commas = quotes = nested = 0
    for at in range(0, len(body), _COUNTED_AT_ONCE):  # of a body with far too many signs most is not looked at
        signs = body[at : at + _COUNTED_AT_ONCE].translate(None, _NO_SIGNS)
        commas += signs.count(b",")
        quotes += signs.count(b'"')
        nested += signs.count(b"[") + signs.count(b"{")
        if max(quotes // 2, nested) > _MOST_SIGNS:
            raise _too_many()
    if quotes // 2 <= _MOST_STRINGS and nested <= _MOST_NESTED and commas <= _MOST_VALUES:
        return
    escapes = body.count(b"\\")
    if escapes > _MOST_ESCAPES:
        raise _too_many()
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"") if escapes else body
    if bare.count(b'"') // 2 > _MOST_STRINGS:
        raise _too_many()
    structure = b"".join(bare.split(b'"')[::2])
    nested = structure.count(b"[") + structure.count(b"{")
    if nested > _MOST_NESTED or structure.count(b",") > _MOST_VALUES:
        raise _too_many()


def _too_many() -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the body has more than {_MOST_STRINGS} strings, {_MOST_NESTED} arrays and objects, or {_MOST_VALUES} values"
    )


def convert(
    value: dict[str, Any], cls: type[StructT], neutral: Neutral, ignored: Collection[str] = (), prefix: str = ""
) -> StructT:
    """A checked request.

    Unknown parameters are refused, as OpenAI does: a misspelt one would otherwise be silently without effect. Those that would
    change the answer but are not supported are refused unless they have a neutral value. Null asks for nothing, whatever its
    name.

    Args:
        value: The JSON object.
        cls: What it should be.
        neutral: Parameters that are not supported, each with the values that ask for nothing.
        ignored: Parameters that are not looked at.
        prefix: What precedes the parameters' names in errors.

    Raises:
        InvalidArgumentError: As said; the parameter is named.
    """
    known = _names_of(cls)
    taken: dict[str, Any] = {}
    for name, given in value.items():
        if given is None:
            continue
        if name in known:
            taken[name] = given
        elif name in neutral:
            if given not in neutral[name]:
                raise InvalidArgumentError(f"{prefix}{name} is not supported", field=prefix + name)
        elif name not in ignored:
            shown = prefix + _printable(name)
            raise InvalidArgumentError(f"unknown parameter: {shown!r}", field=shown)
    try:
        return msgspec.convert(taken, cls)
    except msgspec.ValidationError as error:
        raise _explain_type(str(error), prefix) from error


@cache
def _names_of(cls: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(cls.__struct_fields__)


def _explain_type(text: str, prefix: str) -> InvalidArgumentError:
    found = _AT.match(text)
    what, path = (found["what"], prefix + found["path"]) if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidArgumentError(f"{path} is required", field=path)
    return InvalidArgumentError(f"{path or 'body'}: {what[:1].lower()}{what[1:]}", field=path or None)


def _explain(body: bytes, error: Exception) -> InvalidArgumentError:
    # Slow, but only for bodies that are refused, and small: the standard parser lets bad Unicode through, so it can be located.
    try:
        found = json.loads(body.decode("utf-8", "surrogateescape")) if len(body) <= _MOST_EXPLAINED else None
        path = _find_bad_string(found, "")
    except (ValueError, RecursionError):
        path = None
    if path is not None:
        return InvalidArgumentError(f"{path or 'the body'} is not valid Unicode text", field=path or None)
    return InvalidArgumentError(f"the body is not valid JSON: {error}")


def _find_bad_string(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return None if _is_unicode(value) else path
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        if not all(map(_is_unicode, value)):
            return path
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    for inner, item in items:
        found = _find_bad_string(item, inner)
        if found is not None:
            return found
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(name: str) -> str:
    return name[:100]
