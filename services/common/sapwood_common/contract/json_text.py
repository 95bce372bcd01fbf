"""Reads a client's JSON as values."""

from __future__ import annotations

from itertools import count
from math import isinf
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError

MOST_FLOATS = 16_384
"""The most numbers with a fraction or an exponent: no request needs many."""


def decode(text: bytes | str) -> Any:
    """The value. Numbers with a fraction or an exponent are read by Python: msgspec takes 7 us for one such as 1e300, so that a
    body of 16 MB would hold the event loop for 9 s.

    Raises:
        InvalidArgumentError: It has too many such numbers.
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: It is not JSON.
    """
    floats = count(1)

    def read(number: str) -> float:
        if next(floats) > MOST_FLOATS:
            raise InvalidArgumentError(f"there are more than {MOST_FLOATS} numbers with a fraction or an exponent")
        value = float(number)
        if isinf(value):
            raise ValueError("Number out of range")
        return value

    return msgspec.json.Decoder(float_hook=read).decode(text)
