"""What brings a client nothing may be done so often and no more; what belongs to calls never counts."""

from __future__ import annotations

from functools import partial

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_net.http2.server.limits import frame_rates
from sapwood_net.http2.server.limits.frame_rates import RULES, FrameRates
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import ConnectionFailedError
from sapwood_net.pacing.time_share import TimeShare

PING = frames.frame(frames.PING, 0, 0, bytes(8))


@pytest.fixture
def at_once(monkeypatch) -> None:
    """All that a connection is sent comes at one moment, however long it takes here."""
    monkeypatch.setattr("sapwood_net.http2.server.connection.FrameRates", partial(FrameRates, lambda: 0.0))


async def test_frames_are_bounded_at_once_and_a_second_and_earned_ones_come_on_top() -> None:
    now = 100.0
    rates = FrameRates(lambda: now)
    rule = RULES[frame_rates.PING]

    def count(earned: int = 0) -> int:
        taken = 0
        while True:
            try:
                rates.take(frame_rates.PING, earned)
            except ConnectionFailedError as error:
                assert error.code is ErrorCodes.ENHANCE_YOUR_CALM
                assert str(error) == f"more than {rule.per_second} {rule.name} a second"
                return taken
            taken += 1

    assert count() == rule.burst
    assert count() == 0
    now += 2.0
    assert count() == 2 * rule.per_second
    assert count(earned=7) == 7
    assert count(earned=7) == 0
    now += 3600.0  # a long pause earns no more than a burst
    assert count(earned=10**9) == rule.burst


async def test_a_stranger_has_no_more_at_once_than_in_a_second_until_he_shows_a_key() -> None:
    now = 100.0
    rates = FrameRates(lambda: now, stranger=True)
    rule = RULES[frame_rates.RESET]

    def count() -> int:
        for taken in range(10_000):
            try:
                rates.take(frame_rates.RESET)
            except ConnectionFailedError:
                return taken
        raise AssertionError("there is no limit")

    assert count() == rule.per_second
    now += 100.0
    assert count() == rule.per_second
    rates.know()
    rates.know()
    assert count() == rule.burst - rule.per_second
    now += 100.0
    assert count() == rule.burst


async def test_settings_count_by_their_length(make_wire) -> None:
    long = frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, size) for size in range(2700)])
    wire = make_wire(stranger=True)
    wire.send(long)
    (error,) = wire.failed
    assert RULES[frame_rates.SETTINGS].name in str(error)
    wire = make_wire()
    wire.send(long)  # from a client that is known, one such frame is taken
    assert not wire.failed
    wire.send(long)
    assert wire.failed


USELESS = {
    "PING": (frame_rates.PING, lambda _: PING),
    "SETTINGS": (frame_rates.SETTINGS, lambda _: frames.settings(())),
    "SETTINGS of table sizes": (
        frame_rates.SETTINGS,
        lambda _: frames.settings([(SettingCodes.HEADER_TABLE_SIZE, size) for size in (0, 4096)]),
    ),
    "WINDOW_UPDATE": (frame_rates.WINDOW_UPDATE, lambda _: frames.window_update(0, 1)),
    "WINDOW_UPDATE of a stream": (frame_rates.WINDOW_UPDATE, lambda _: frames.window_update(1, 1)),
    "empty DATA": (frame_rates.CRUMB, lambda _: frames.frame(frames.DATA, 0, 1)),
    "padded DATA": (frame_rates.CRUMB, lambda _: frames.frame(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(255))),
    "DATA of a stream that is over": (frame_rates.CRUMB, lambda _: frames.frame(frames.DATA, 0, 3, b"\0")),
    "PRIORITY": (frame_rates.OTHER, lambda _: frames.frame(frames.PRIORITY, 0, 1, bytes(5))),
    "unknown frames": (frame_rates.OTHER, lambda _: frames.frame(0xFA, 0, 0)),
    "acknowledgements": (frame_rates.OTHER, lambda _: frames.frame(frames.PING, frames.ACK, 0, bytes(8))),
    "resets of a stream that is over": (frame_rates.OTHER, lambda _: frames.reset(3, 8)),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", USELESS)
async def test_a_flood_of_frames_without_use_ends_its_connection_and_says_why(make_wire, kind) -> None:
    index, make = USELESS[kind]
    wire = make_wire()
    call = wire.open(1)
    wire.open(3)
    wire.send(frames.reset(3, 8))
    most = RULES[index].burst + 4  # the two streams have earned four more
    for number in range(most - 20):
        wire.send(make(number))
    assert wire.failed == []
    for number in range(2000):
        if wire.failed:
            break
        wire.send(make(number))
    (error,) = wire.failed
    assert error.code is ErrorCodes.ENHANCE_YOUR_CALM
    assert RULES[index].name in str(error)
    goaway = wire.answers()[-1]
    assert goaway[0] == frames.GOAWAY
    assert goaway[3][4:8] == ErrorCodes.ENHANCE_YOUR_CALM.to_bytes(4, "big")
    assert goaway[3][8:].decode() == str(error)
    assert (call.left, wire.transport.closed) == (1, True)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("rapid reset", frame_rates.RESET),
        ("resets that we are made to send", frame_rates.FAULT),
        ("more streams than are allowed", frame_rates.FAULT),
    ],
)
async def test_a_flood_of_streams_that_nobody_wants_answered_ends_its_connection(
    make_wire, request_block, kind, rule
) -> None:
    wire = make_wire(most_streams=8)
    block = request_block()
    after = {"rapid reset": lambda stream: frames.reset(stream, 8)}.get(kind, lambda stream: b"")
    if rule == frame_rates.FAULT and kind != "more streams than are allowed":
        after = lambda stream: frames.window_update(stream, 0)  # noqa: E731
    opened = 0
    while not wire.failed and opened < 5000:
        stream = 2 * opened + 1
        wire.send(frames.header_frames(stream, block, frames.USUAL_FRAME) + after(stream))
        opened += 1
    (error,) = wire.failed
    assert error.code is ErrorCodes.ENHANCE_YOUR_CALM
    assert RULES[rule].name in str(error)
    assert RULES[rule].burst < opened < RULES[rule].burst + 200


@pytest.mark.usefixtures("at_once")
async def test_a_client_that_calls_comes_near_no_limit_however_much_it_calls(
    make_wire, request_block, grpc_message
) -> None:
    """Each call with a ping, two window updates, an end of its own and a reset once it is answered, as grpc-core's have."""
    wire = make_wire(echo=True)
    block, body = request_block(), grpc_message(b"hello")
    for number in range(5000):
        stream = 2 * number + 1
        wire.send(
            frames.header_frames(stream, block, frames.USUAL_FRAME)
            + frames.frame(frames.DATA, 0, stream, body)
            + frames.window_update(stream, 5)
            + frames.window_update(0, 10)
            + PING
            + frames.frame(frames.DATA, frames.END_STREAM, stream)
            + frames.reset(stream, 8)
        )
        wire.transport.written.clear()
    assert wire.failed == []
    assert len(wire.calls) == 5000


async def test_a_stream_of_small_messages_may_be_read_and_asked_after_one_by_one(make_wire) -> None:
    wire = make_wire()
    stream = wire.open(1).stream
    stream.send_headers(frames.STATUS_200)
    for _ in range(20_000):
        stream.write(b"token")
        wire.send(frames.window_update(1, 10) + frames.window_update(0, 10))
    assert wire.failed == []
    for _ in range(20_000):
        stream.write(b"token")
        wire.send(PING + frames.window_update(1, 10) + frames.window_update(0, 10))
    assert wire.failed == []


@pytest.mark.usefixtures("at_once")
async def test_windows_of_one_byte_make_us_send_so_many_frames_of_one_byte_and_no_more(make_wire) -> None:
    wire = make_wire()
    wire.send(frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, 0)]))
    stream = wire.open(1).stream
    stream.write(bytes(100_000))
    wire.answers()
    while not wire.failed:
        wire.send(frames.window_update(1, 1))
    sent = [payload for kind, _, _, payload in wire.answers() if kind == frames.DATA]
    assert {len(payload) for payload in sent} == {1}
    assert len(sent) < 2.5 * RULES[frame_rates.WINDOW_UPDATE].burst


async def test_a_client_that_leaves_thousands_of_calls_is_forgotten_in_portions(make_wire) -> None:
    """The calls are told one after another, and none of them writes any more."""
    turns = iter(range(1_000_000))
    wire = make_wire(share=TimeShare(lambda: next(turns) / 50_000))  # every look at the clock finds 20 us more
    calls = [wire.open(number) for number in range(1, 2001, 2)]
    wire.connection.connection_lost(None)
    told = sum(call.left for call in calls)
    assert 0 < told < 100
    written = len(wire.transport.written)
    calls[0].stream.send_headers(frames.STATUS_200)
    calls[0].stream.write(b"nobody reads it")
    calls[0].stream.finish(frames.literal(b"grpc-status", b"0"))
    assert len(wire.transport.written) == written
    while wire.connection.go_on(float("inf")):
        pass
    assert sum(call.left for call in calls) == len(calls)
