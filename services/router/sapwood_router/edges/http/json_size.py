"""Refuses bodies of JSON that would take long, or much memory, before they are parsed."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from sapwood_common.errors import InvalidArgumentError

_MOST_STRINGS, _MOST_NESTED = 65_536, 16_384
"""The most strings of a body, keys included, and the most arrays and objects together. Without these bounds a body of 16 MB would
block the event loop for half a second, and the checks of its content for longer; it would take 400 MB.
"""
SMALL = 2 * _MOST_NESTED
"""Bytes: a smaller body cannot have too many."""
_MANY_STRINGS, _MANY_NESTED = 8_192, 1_024
"""Strings, and arrays and objects, beyond which it takes some milliseconds to parse a body and to make a request of it."""
_BATCH, _BESIDE, _MOST_VALUES = 262_144, 65_536, 1_310_720
"""Values of a body that are taken whatever models there are; those beside the tokens of one prompt; and the most of any body."""
_MOST_SIGNS, _MOST_ESCAPES = 262_144, 1_048_576
"""The most pairs of quotes, and brackets, those in texts counted: a text with as many is longer than any context. The most
backslashes in a body whose texts must be told apart from the rest.
"""
_MOST_CHARACTERS_ESCAPED = 1_048_576
"""The most ``\\u`` of a body, in texts or not: a million pairs of surrogates take 37 ms to parse in one piece."""
_LONG_NUMBER, _MOST_LONG_NUMBERS = b"0" * 128, 4096
"""Digits in a row that are counted, in texts, too: Python takes the square of their number for an integer, 58 us for 4000."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_COUNTED_AT_ONCE = 64 * 1024
_NO_SIGNS = bytes(sign for sign in range(256) if sign not in b',"[{')
"""Counting signs among signs takes less than half of the time that counting them in all of a text does."""


def most_values(longest_context: int) -> int:
    """How many values a body may have where no model's context holds more tokens: to parse a million takes 20 ms in one piece."""
    return min(max(_BATCH, longest_context + _BESIDE), _MOST_VALUES)


def check_size(body: bytes) -> bool:
    """Refuses a body with too many values. Characters in texts do not count, unless they alone are too many.

    Returns:
        Whether the body may have too many to read quickly. There what stands in texts does count.

    Raises:
        InvalidArgumentError: It has far too many.
    """
    steps = size_steps(body)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)


def size_steps(body: bytes, most: int = _MOST_VALUES) -> Generator[None, None, bool]:
    """The same, a step for each 64 KB, which takes up to half a millisecond.

    Args:
        body: The body.
        most: Values that it may have.

    Raises:
        InvalidArgumentError: It has far too many.
    """
    commas = quotes = nested = characters = digits = 0
    for at in range(0, len(body), _COUNTED_AT_ONCE):  # of a body with far too many signs most is not looked at
        piece = bytes(body[at : at + _COUNTED_AT_ONCE])
        characters += piece.count(b"\\u")
        if characters > _MOST_CHARACTERS_ESCAPED:
            raise InvalidArgumentError(
                f"the body has more than {_MOST_CHARACTERS_ESCAPED} escaped characters (\\u...): send them as UTF-8"
            )
        digits += piece.translate(_DIGITS).count(_LONG_NUMBER)
        if digits > _MOST_LONG_NUMBERS:
            raise InvalidArgumentError(
                f"the body has more than {_MOST_LONG_NUMBERS} times {len(_LONG_NUMBER)} digits in numbers as long as that"
            )
        signs = piece.translate(None, _NO_SIGNS)
        commas += signs.count(b",")
        quotes += signs.count(b'"')
        nested += signs.count(b"[") + signs.count(b"{")
        if max(quotes // 2, nested) > _MOST_SIGNS:
            raise _too_many(most)
        yield
    if quotes // 2 > _MOST_STRINGS or nested > _MOST_NESTED or commas > most:
        yield from _steps_without_texts(body, most)
    return quotes // 2 > _MANY_STRINGS or nested > _MANY_NESTED


def _steps_without_texts(body: bytes, most: int) -> Iterator[None]:
    commas = quotes = nested = escapes = at = 0
    while at < len(body):
        part = bytes(body[at : at + _COUNTED_AT_ONCE])
        if at + len(part) < len(body) and (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = part[:-1]  # what it escapes comes later
        end = at + len(part)
        escapes += part.count(b"\\")
        if escapes > _MOST_ESCAPES:
            raise _too_many(most)
        bare = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = bare.split(b'"')
        structure = b"".join(pieces[quotes % 2 :: 2])  # of the pieces every second stands in a text
        quotes += len(pieces) - 1
        nested += structure.count(b"[") + structure.count(b"{")
        commas += structure.count(b",")
        if quotes // 2 > _MOST_STRINGS or nested > _MOST_NESTED or commas > most:
            raise _too_many(most)
        yield
        at = end


def _too_many(most: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the body has more than {_MOST_STRINGS} strings, {_MOST_NESTED} arrays and objects, or {most} values"
    )
