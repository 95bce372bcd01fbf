"""Windows of both sides: nothing beyond them is sent or taken, and streams that wait for the same room write in turn."""

from __future__ import annotations

import asyncio

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_net.http2.server.flow_control import _MOST_AT_ONCE
from sapwood_net.http2.server.limits.shared import SharedLimits
from sapwood_net.http2.server.stream import WINDOW, ServerStream
from sapwood_net.http2.server.turnstile import MOST_A_TURN, Turnstile
from sapwood_net.http2.wire import frames
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.time_share import TimeShare

INITIAL = SettingCodes.INITIAL_WINDOW_SIZE
PREFIX = 5


def set_window(wire, size: int) -> None:
    wire.send(frames.settings([(INITIAL, size)]))


def test_a_window_that_shrinks_below_nothing_is_made_up_for_first(make_wire) -> None:
    wire = make_wire()
    stream = wire.open(1).stream
    stream.write(bytes(100_000))
    assert wire.data_sent() == {1: 65_535}
    set_window(wire, 0)
    assert stream.window == -65_535
    wire.send(frames.window_update(0, 1 << 20) + frames.window_update(1, 65_535))
    assert wire.data_sent() == {}
    wire.send(frames.window_update(1, 10))
    assert wire.data_sent() == {1: 10}
    set_window(wire, 100)
    assert wire.data_sent() == {1: 100}
    stream.finish(frames.literal(b"grpc-status", b"0"))
    wire.send(frames.window_update(1, 1 << 20))
    assert wire.data_sent() == {1: 100_000 + PREFIX - 65_535 - 110}
    assert wire.connection.idle


def test_frames_are_as_large_as_the_client_takes_up_to_a_bound(make_wire) -> None:
    wire = make_wire()
    wire.send(frames.window_update(0, 1 << 24) + frames.settings([(INITIAL, 1 << 24)]))
    stream = wire.open(1).stream
    for allowed, largest in ((16_384, 16_384), (20_000, 20_000), (frames.LARGEST_FRAME, 65_536)):
        wire.send(frames.settings([(SettingCodes.MAX_FRAME_SIZE, allowed)]))
        wire.answers()
        stream.write(bytes(300_000))
        assert max(len(payload) for _, _, _, payload in wire.answers()) == largest


def test_trailers_need_no_window(make_wire) -> None:
    wire = make_wire()
    set_window(wire, 0)
    wire.open(1).stream.finish(frames.literal(b"grpc-status", b"0"))
    assert wire.connection.idle


def test_streams_share_a_connection_window_in_turn(make_wire) -> None:
    wire = make_wire()
    set_window(wire, 1 << 30)
    streams = [wire.open(number).stream for number in (1, 3, 5)]
    for stream in streams:
        stream.write(bytes(1 << 20))
    assert wire.data_sent() == {1: 65_535}
    turns = []
    for _ in range(6):
        wire.send(frames.window_update(1, 1))  # an update of its own window does not take a stream past the others
        wire.send(frames.window_update(0, 30_000))
        turns.append(wire.data_sent())
    assert [next(iter(turn)) for turn in turns] == [1, 3, 5, 1, 3, 5]
    assert all(list(turn.values()) == [30_000] for turn in turns)


def test_a_stream_without_a_window_does_not_hold_up_the_others(make_wire) -> None:
    wire = make_wire()
    stuck, free = wire.open(1).stream, wire.open(3).stream
    wire.send(frames.window_update(0, 1 << 20))
    stuck.write(bytes(1 << 20))
    assert wire.data_sent() == {1: 65_535}
    free.write(b"x" * 1000)
    assert wire.data_sent() == {3: 1005}


def test_streams_share_a_slow_socket_in_turn(make_wire) -> None:
    """The socket takes a frame at a time: who waits longest has it."""
    wire = make_wire()
    wire.send(frames.window_update(0, 1 << 30) + frames.settings([(INITIAL, 1 << 30)]))
    streams = [wire.open(number).stream for number in (1, 3, 5)]
    wire.pause()
    for stream in streams:
        stream.write(bytes(1 << 20))
    wire.answers()
    wire.transport.on_write = wire.pause
    turns = []
    for _ in range(6):
        wire.resume()
        turns += wire.data_sent()
    assert turns == [1, 3, 5, 1, 3, 5]


def test_a_client_that_ignores_a_streams_window_loses_the_stream(make_wire, grpc_message) -> None:
    wire = make_wire()
    call, other = wire.open(1), wire.open(3)
    wire.answers()
    data = frames.frame(frames.DATA, 0, 1, grpc_message(bytes(frames.USUAL_FRAME - PREFIX)))
    for _ in range(WINDOW // frames.USUAL_FRAME):
        wire.send(data)
    assert wire.answers() == []
    wire.send(frames.frame(frames.DATA, 0, 1, b"\0"))
    assert (frames.RST_STREAM, 0, 1, ErrorCodes.FLOW_CONTROL_ERROR.to_bytes(4, "big")) in wire.answers()
    assert (call.left, other.left) == (1, 0)


def test_a_client_may_go_on_as_messages_are_taken(make_wire, grpc_message) -> None:
    wire = make_wire()
    call = wire.open(1)
    window, sent = WINDOW, 0
    body = grpc_message(bytes(frames.USUAL_FRAME - PREFIX))
    while sent < 10 * WINDOW:
        assert window >= len(body)
        wire.send(frames.frame(frames.DATA, 0, 1, body))
        window, sent = window - len(body), sent + len(body)
        call.stream.taken(len(body) - PREFIX)
        window += sum(int.from_bytes(p, "big") for k, _, s, p in wire.answers() if (k, s) == (frames.WINDOW_UPDATE, 1))
    assert not call.left


def test_a_message_larger_than_the_window_comes_whole(make_wire, grpc_message) -> None:
    wire = make_wire(10 * WINDOW)
    call = wire.open(1)
    body = grpc_message(bytes(5 * WINDOW) + b"end")
    window, at = WINDOW, 0
    while at < len(body):
        piece = body[at : at + min(window, frames.USUAL_FRAME)]
        assert piece, "the client may not go on"
        wire.send(frames.frame(frames.DATA, 0, 1, piece))
        window, at = window - len(piece), at + len(piece)
        window += sum(int.from_bytes(p, "big") for k, _, s, p in wire.answers() if (k, s) == (frames.WINDOW_UPDATE, 1))
    assert [(len(m), m[-3:]) for m, _ in call.messages] == [(5 * WINDOW + 3, b"end")]


def test_the_connections_window_comes_back_also_for_streams_that_are_over(make_wire) -> None:
    wire = make_wire()
    granted = 0
    for stream in range(1, 25, 2):
        wire.open(stream)
        wire.send(frames.reset(stream, ErrorCodes.CANCEL))
        for _ in range(WINDOW // frames.USUAL_FRAME):
            wire.send(frames.frame(frames.DATA, 0, stream, bytes(frames.USUAL_FRAME)))
        granted += sum(int.from_bytes(p, "big") for k, _, s, p in wire.answers() if (k, s) == (frames.WINDOW_UPDATE, 0))
    assert granted > 8 << 20


async def test_more_data_of_streams_that_are_over_than_their_windows_ends_the_connection(make_wire) -> None:
    wire = make_wire()
    for stream in (1, (1 << 31) - 1):  # the streams whose numbers lie between these have no windows
        wire.open(stream)
        wire.send(frames.reset(stream, ErrorCodes.CANCEL))
    data = frames.frame(frames.DATA, 0, 1, bytes(frames.USUAL_FRAME))
    for _ in range(2 * WINDOW // frames.USUAL_FRAME):
        wire.send(data)
    assert not wire.failed
    wire.send(data)
    assert [error.code for error in wire.failed] == [ErrorCodes.ENHANCE_YOUR_CALM]


async def test_of_connections_that_send_much_at_once_a_few_are_read_in_a_turn(make_wire) -> None:
    common = SharedLimits(BodyMemory(1 << 30), TimeShare(lambda: 0.0))
    common.breaths = Turnstile(lambda: 0.0)
    wires = [make_wire(shared=common) for _ in range(3 * MOST_A_TURN)]
    for wire in wires:
        wire.open(1)
        wire.send(frames.frame(frames.DATA, 0, 1, bytes(frames.USUAL_FRAME)) * 4)
    reading = []
    for _ in range(4):
        reading.append(sum(wire.transport.reading for wire in wires))
        await asyncio.sleep(0)
    assert reading[0] == MOST_A_TURN
    assert reading[1] <= 2 * MOST_A_TURN
    assert reading[-1] == 3 * MOST_A_TURN
    for wire in wires:
        wire.connection.connection_lost(None)


def test_a_client_that_asks_on_and_reads_nothing_is_given_up(make_wire) -> None:
    wire = make_wire()
    call = wire.open(1)
    wire.pause()
    wire.transport.unread = 1 << 20
    wire.send(frames.frame(frames.PING, 0, 0, bytes(8)))
    assert not wire.transport.aborted
    wire.transport.unread = 5 << 20
    wire.send(frames.frame(frames.PING, 0, 0, bytes(8)))
    assert wire.transport.aborted
    wire.connection.connection_lost(None)
    assert call.left == 1


def test_a_settings_frame_of_many_windows_counts_once(make_wire) -> None:
    wire = make_wire()
    streams = [wire.open(number).stream for number in range(1, 4001, 2)]
    wire.send(frames.settings([(INITIAL, value) for value in range(2700)]))
    assert {stream.window for stream in streams} == {2699}
    assert wire.open(4001).stream.window == 2699


@pytest.fixture
def flushes(monkeypatch) -> list[int]:
    """Streams that were looked at: whether they have something to write, and may."""
    found: list[int] = []
    flush = ServerStream.flush

    def counted(stream: ServerStream) -> None:
        found.append(stream.number)
        flush(stream)

    monkeypatch.setattr(ServerStream, "flush", counted)
    return found


async def test_settings_cost_the_same_however_many_answers_wait(make_wire, flushes) -> None:
    wire = make_wire()
    set_window(wire, 0)
    streams = [wire.open(number).stream for number in range(1, 4001, 2)]
    for stream in streams:
        stream.write(b"answer")
    flushes.clear()
    for _ in range(10):  # windows that still let no stream write
        wire.send(frames.settings([(INITIAL, 0)]) + frames.settings([(INITIAL, 0)]))
    assert flushes == []
    set_window(wire, 11)
    assert len(flushes) == _MOST_AT_ONCE
    assert wire.data_sent() == {stream.number: 11 for stream in streams[:_MOST_AT_ONCE]}
    set_window(wire, 0)  # the other streams have no room any more, and do not look for it again and again
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(flushes) <= 2 * _MOST_AT_ONCE + len(streams)
    set_window(wire, 11)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(wire.data_sent()) == len(streams) - _MOST_AT_ONCE


async def test_room_of_one_byte_is_one_streams(make_wire, flushes) -> None:
    """Two hundred updates of the connection's window over two thousand answers that wait for it."""
    wire = make_wire()
    set_window(wire, 1 << 20)
    first, *others = (wire.open(number).stream for number in range(1, 4001, 2))
    first.write(bytes(65_535 - PREFIX))
    for stream in others:
        stream.write(b"answer")
    wire.answers()
    flushes.clear()
    for _ in range(200):
        wire.send(frames.window_update(0, 1))
    assert len(flushes) == 200
    assert set(wire.data_sent().values()) == {1}


async def test_a_window_too_large_is_found_also_among_many(make_wire) -> None:
    wire = make_wire()
    streams = [wire.open(number).stream for number in range(1, 101, 2)]
    wire.send(frames.window_update(31, 1 << 30))
    set_window(wire, (1 << 30) - 1)
    assert not wire.transport.closed
    streams[15].write(bytes(100_000))  # the bytes that a stream has used up no longer count for its window
    wire.send(frames.window_update(0, 1 << 20))
    set_window(wire, (1 << 30) + 50_000)
    assert not wire.transport.closed
    set_window(wire, (1 << 30) + 100_005)
    assert wire.transport.closed
