"""What a client sent as JSON is read in a time that goes with its length."""

from __future__ import annotations

import random

import msgspec
import pytest

from sapwood_common.contract import json_text
from sapwood_common.contract.json_text import MOST_FLOATS, decode
from sapwood_common.errors import InvalidArgumentError


@pytest.mark.parametrize("number", ["1e300", "1.2345678901234567e-300", "0." + 310 * "0" + "1"])
def test_numbers_that_msgspec_reads_slowly_are_read_by_python(number, monkeypatch) -> None:
    read: list[str] = []

    class Float(float):
        def __new__(cls, text: str) -> Float:
            read.append(text)
            return super().__new__(cls, text)

    monkeypatch.setattr(json_text, "float", Float, raising=False)
    assert decode(f"[{number}, {number}, 7]") == [float(number), float(number), 7]
    assert read == [number, number]


def test_a_body_with_very_many_is_refused_at_the_first_that_is_too_many(monkeypatch) -> None:
    body = b"[" + b",".join([b"1e300"] * MOST_FLOATS)
    assert len(decode(body + b"]")) == MOST_FLOATS
    monkeypatch.setattr(msgspec.json, "decode", None)
    with pytest.raises(InvalidArgumentError, match="more than 16384 numbers"):
        decode(body + b",1.5" + b",1e300" * 1000)  # what follows is not read: it does not even end
    assert len(decode(b"[" + b",".join([b"7"] * 10 * MOST_FLOATS) + b"]")) == 10 * MOST_FLOATS


def test_values_are_those_of_the_usual_reader() -> None:
    random_ = random.Random(1)
    for _ in range(2000):
        number = random_.choice(
            [
                random_.uniform(-1, 1),
                random_.randrange(2**64),
                random_.expovariate(1) * 10.0 ** random_.randrange(-300, 300),
            ]
        )
        text = msgspec.json.encode({"a": [number, "é", None, True]})
        assert decode(text) == msgspec.json.decode(text)
    for wrong in (b"", b"{", b'{"a": 1.}', b"[1e999]", b'"\xff"', b"[NaN]"):
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            decode(wrong)
