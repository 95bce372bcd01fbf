"""Bodies of JSON that would take long, or much memory, are refused before they are read."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable
from types import SimpleNamespace
from typing import cast

import pytest

from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_router.edges.http import json_size
from sapwood_router.edges.http.errors import OPENAI
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import decode_object
from sapwood_router.edges.http.json_size import check_size, most_values, size_steps
from sapwood_router.edges.http1.body import Body
from sapwood_router.edges.http1.request import Request

MANY = 300_000


@pytest.mark.parametrize(
    "value",
    [
        b"[%b]" % b",".join([b'"a"'] * MANY),
        b"{%b}" % b",".join(b'"%d":1' % number for number in range(MANY)),
        b"[%b]" % b",".join([b"{}"] * MANY),
        b"[%b]" % b",".join([b"[]"] * MANY),
        b"[%b]" % b",".join([b"1"] * 8 * MANY),
        b"[" * MANY + b"]" * MANY,
    ],
    ids=["strings", "keys", "objects", "arrays", "numbers", "nested"],
)
def test_a_body_of_far_too_many_values_is_refused(value) -> None:
    with pytest.raises(InvalidArgumentError, match="the body has more than"):
        check_size(b'{"prompt": %b}' % value)


def test_how_many_values_a_body_may_have_goes_by_the_longest_context() -> None:
    body = b'{"prompt": [%b]}' % b",".join([b"7"] * MANY)
    assert most_values(0) == most_values(128_000) == 262_144
    assert most_values(1_000_000) == 1_065_536
    assert most_values(10_000_000) == 1_310_720
    assert len(list(size_steps(body, most_values(MANY)))) == -(-len(body) // (64 * 1024))
    with pytest.raises(InvalidArgumentError, match="or 262144 values"):
        list(size_steps(body, most_values(131_072)))


def test_many_values_take_long_and_long_texts_do_not() -> None:
    assert check_size(json.dumps({"messages": [{"role": "user", "content": "a"}] * 1_500}).encode())
    assert check_size(json.dumps({"input": ["a" * 10] * 10_000}).encode())
    assert not check_size(json.dumps({"messages": [{"role": "user", "content": "a" * 5_000}] * 40}).encode())
    assert not check_size(json.dumps({"prompt": [128_000] * 20_000}).encode())


@pytest.mark.parametrize(("count", "waits"), [(100, False), (700, False), (3_000, True), (10_000, True)])
async def test_a_body_of_many_values_waits_for_its_turn_while_it_counts_as_held(count: int, waits: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * count}).encode()
    memory, turns = BodyMemory(1 << 24), []

    class Turns(HeavyWork):
        async def turn(self, caller: Hashable = None, *, goes_on: bool = False) -> None:
            turns.append((caller, memory.held))

    came = Body(len(body), memory)
    came.feed(body, 0)
    head = SimpleNamespace(fields={}, method="POST", path="/v1/chat/completions")
    request = SimpleNamespace(
        head=head,
        resumes=False,
        writable=None,
        write_chunk=None,
        take_body=came.take,
        receive_body=lambda limit, look_at: came.receive(limit, lambda: None, look_at),
    )
    exchange = Exchange(cast(Request, request), OPENAI)
    given = exchange.take_body(1 << 24)
    if given is None:
        given = await exchange.receive_body(1 << 24, Turns(), lambda: 0)
    assert bytes(given) == body
    assert bool(turns) == waits
    assert all(turn == ("", len(body)) for turn in turns)
    assert memory.held == 0


@pytest.mark.parametrize("depth", [2_000, 10_000])
def test_a_body_that_is_nested_deeply_is_refused(depth) -> None:
    with pytest.raises(InvalidArgumentError, match="nested too deeply"):
        decode_object(b'{"stop": %b}' % (b"[" * depth + b"]" * depth))


def test_long_texts_and_many_tokens_are_not() -> None:
    text = 'a "quoted" word, {and} [more]; ' * 50_000
    check_size(b'{"prompt": "%b"}' % text.replace('"', '\\"').encode())
    check_size(b'{"prompt": [%b]}' % b",".join([b"128000"] * MANY))


def test_a_program_as_text_passes_with_more_signs_than_values_may_have() -> None:
    code = 'print({"a": [1, "\\\\"], "b": "c\\""})\n' * 20_000
    check_size(json.dumps({"prompt": code}).encode())


def test_a_body_of_a_million_escapes_is_refused_and_its_utf_8_form_is_served() -> None:
    few, many = "\u20ac" * 1_000_000, "\U0001f332" * 600_000
    check_size(json.dumps({"prompt": few}).encode())
    with pytest.raises(InvalidArgumentError, match="escaped characters"):
        check_size(json.dumps({"prompt": many}).encode())  # each takes two
    check_size(json.dumps({"prompt": many}, ensure_ascii=False).encode())


@pytest.mark.parametrize("digits", [4000, 300])
def test_a_body_of_long_numbers_is_refused_and_one_of_many_tokens_is_not(digits) -> None:
    number = b"7" * digits
    check_size(b'{"a": [%b]}' % b",".join([number] * (500_000 // digits)))
    with pytest.raises(InvalidArgumentError, match="128 digits"):
        check_size(b'{"a": [%b]}' % b",".join([number] * (2_000_000 // digits)))
    check_size(b'{"prompt": [%b]}' % b",".join([b"1234567"] * 250_000))


def _parts(value) -> tuple[int, int]:
    """Strings, keys included, and arrays and objects."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [_parts(each) for each in (value.values() if isinstance(value, dict) else value)]
    strings = sum(each for each, _ in inner) + (len(value) if isinstance(value, dict) else 0)
    return strings, 1 + sum(each for _, each in inner)


def test_what_stands_in_texts_does_not_count(monkeypatch) -> None:
    random_ = random.Random(1)
    monkeypatch.setattr(json_size, "_MOST_STRINGS", 8)
    monkeypatch.setattr(json_size, "_MOST_NESTED", 4)
    monkeypatch.setattr(json_size, "_COUNTED_AT_ONCE", 3)  # what is escaped may come in the next piece

    def text() -> str:
        return "".join(random_.choices('a"\\[{,]}', k=random_.randrange(6)))

    def value(depth: int):
        kind = random_.randrange(4 if depth < 3 else 2)
        if kind < 2:
            return text() if kind else 7
        some = range(random_.randrange(4))
        return [value(depth + 1) for _ in some] if kind == 2 else {text(): value(depth + 1) for _ in some}

    refused = 0
    for _ in range(500):
        given = {"prompt": value(0), "suffix": text()}
        strings, nested = _parts(given)
        if strings > 8 or nested > 4:
            refused += 1
            with pytest.raises(InvalidArgumentError, match="the body has more than"):
                list(size_steps(json.dumps(given).encode()))
        else:
            list(size_steps(json.dumps(given).encode()))
    assert 50 < refused < 450


def test_bad_unicode_is_located_in_bodies_that_are_not_large() -> None:
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\.content is not valid Unicode"):
        decode_object(b'{"messages": [{"content": "\xff"}]}')
    with pytest.raises(InvalidArgumentError, match="not valid JSON"):
        decode_object(b'{"prompt": "%b\xff"}' % (b"a" * 2_000_000))


@pytest.mark.parametrize(
    "text", [b"a " * 4_000_000, b'\\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 250_000], ids=["plain", "quoted"]
)
def test_a_long_text_is_looked_at_in_steps(text) -> None:
    body = Counted(b'{"prompt": "%b"}' % text)
    most, steps, before = 0, 0, 0
    for _ in size_steps(body):
        most, steps, before = max(most, body.looked_at - before), steps + 1, body.looked_at
    assert steps >= 100
    assert most <= 2 * 64 * 1024


class Counted(bytes):
    """Bytes that count how many of them are looked at, a slice at a time."""

    looked_at = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.looked_at += len(found) if isinstance(found, bytes) else 1
        return found


def test_of_a_body_with_far_too_many_values_only_the_beginning_is_counted() -> None:
    body = Counted(b'{"prompt": [%b]}' % b",".join([b"{}"] * 1_000_000))
    with pytest.raises(InvalidArgumentError, match="the body has more than"):
        check_size(body)
    assert 0 < body.looked_at < 1_000_000
