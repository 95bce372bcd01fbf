"""RFC 9113, 6: each kind of frame, its size, its stream and what it may say."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame

PROTOCOL = ErrorCodes.PROTOCOL_ERROR
SIZE = ErrorCodes.FRAME_SIZE_ERROR
FLOW = ErrorCodes.FLOW_CONTROL_ERROR
PADDED_HEADERS = frames.PADDED | frames.END_HEADERS
UPDATE = SettingCodes.INITIAL_WINDOW_SIZE


def continuation(end: bool) -> bytes:
    return frame(frames.CONTINUATION, frames.END_HEADERS if end else 0, 1, frames.literal(b"x", b"y"))


FAILING = {
    "6.1/1 DATA on the connection": (lambda b: frame(frames.DATA, 1, 0, b"test"), PROTOCOL),
    "6.1/3 DATA with more padding than payload": (
        lambda b: b.open(1) + frame(frames.DATA, frames.PADDED | 1, 1, b"\x06Test"),
        PROTOCOL,
        1,
    ),
    "6.1 DATA padded with all that there is": (
        lambda b: b.open(1) + frame(frames.DATA, frames.PADDED, 1, b"\x05Test."[:5]),
        PROTOCOL,
        1,
    ),
    "6.1 DATA that lacks the length of its padding": (lambda b: b.open(1) + frame(frames.DATA, 8, 1), PROTOCOL, 1),
    "6.2/1 HEADERS without an end, then PRIORITY": (
        lambda b: frame(frames.HEADERS, 1, 1, b.block()) + frame(frames.PRIORITY, 0, 1, bytes(5)),
        PROTOCOL,
    ),
    "6.2/2 HEADERS without an end, then of another stream": (
        lambda b: frame(frames.HEADERS, 1, 1, b.block()) + b.headers(3),
        PROTOCOL,
    ),
    "6.2/3 HEADERS on the connection": (lambda b: b.headers(0), PROTOCOL),
    "6.2/4 HEADERS with more padding than payload": (
        lambda b: frame(frames.HEADERS, PADDED_HEADERS, 1, b"\xff" + b.block()[:20]),
        PROTOCOL,
    ),
    "6.2 HEADERS that lack part of their priority": (
        lambda b: frame(frames.HEADERS, frames.END_HEADERS | frames.WITH_PRIORITY, 1, b"abc"),
        SIZE,
    ),
    "6.3/1 PRIORITY of the connection": (lambda b: frame(frames.PRIORITY, 0, 0, b"\0\0\0\x01\x10"), PROTOCOL),
    "6.3/2 PRIORITY of an idle stream, of another size": (lambda b: frame(frames.PRIORITY, 0, 1, bytes(4)), SIZE),
    "6.4/1 RST_STREAM of the connection": (lambda b: frames.reset(0, ErrorCodes.CANCEL), PROTOCOL),
    "6.4/2 RST_STREAM of an idle stream": (lambda b: frames.reset(1, ErrorCodes.CANCEL), PROTOCOL),
    "6.4/3 RST_STREAM of another size": (lambda b: b.open(1) + frame(frames.RST_STREAM, 0, 1, bytes(3)), SIZE, 1),
    "6.5/1 SETTINGS that acknowledge and say something": (
        lambda b: frame(frames.SETTINGS, frames.ACK, 0, bytes(1)),
        SIZE,
    ),
    "6.5/2 SETTINGS of a stream": (lambda b: frame(frames.SETTINGS, 0, 1, bytes(6)), PROTOCOL),
    "6.5/3 SETTINGS of another size": (lambda b: frame(frames.SETTINGS, 0, 0, bytes(3)), SIZE),
    "6.5.2/1 ENABLE_PUSH of 2": (lambda b: frames.settings([(SettingCodes.ENABLE_PUSH, 2)]), PROTOCOL),
    "6.5.2/2 INITIAL_WINDOW_SIZE too large": (lambda b: frames.settings([(UPDATE, 2**31)]), FLOW),
    "6.5.2/3 MAX_FRAME_SIZE too small": (
        lambda b: frames.settings([(SettingCodes.MAX_FRAME_SIZE, 2**14 - 1)]),
        PROTOCOL,
    ),
    "6.5.2/4 MAX_FRAME_SIZE too large": (lambda b: frames.settings([(SettingCodes.MAX_FRAME_SIZE, 2**24)]), PROTOCOL),
    "6.6 PUSH_PROMISE": (lambda b: b.open(1) + frame(frames.PUSH_PROMISE, 4, 1, bytes(3) + b"\x02"), PROTOCOL, 1),
    "6.7/3 PING of a stream": (lambda b: frame(frames.PING, 0, 1, bytes(8)), PROTOCOL),
    "6.7/4 PING of another size": (lambda b: frame(frames.PING, 0, 0, bytes(6)), SIZE),
    "6.8/1 GOAWAY of a stream": (lambda b: frame(frames.GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "6.8 GOAWAY of another size": (lambda b: frame(frames.GOAWAY, 0, 0, bytes(7)), SIZE),
    "6.9/1 WINDOW_UPDATE of the connection by nothing": (lambda b: frames.window_update(0, 0), PROTOCOL),
    "6.9/3 WINDOW_UPDATE of another size": (lambda b: frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
    "6.9.1/2 the connection's window beyond the largest": (lambda b: frames.window_update(0, 2**31 - 1) * 2, FLOW),
    "6.9.2/3 INITIAL_WINDOW_SIZE too large": (lambda b: frames.settings([(UPDATE, 2**31)]), FLOW),
    "6.9.2 INITIAL_WINDOW_SIZE that makes an open stream's too large": (
        lambda b: b.half_closed(1) + frames.window_update(1, 2**30) + frames.settings([(UPDATE, 2**31 - 1)]),
        FLOW,
        1,
    ),
    "6.10/2 CONTINUATION, then another frame": (
        lambda b: frame(frames.HEADERS, 0, 1, b.block()) + continuation(False) + frame(frames.DATA, 1, 1, b"test"),
        PROTOCOL,
    ),
    "6.10/3 CONTINUATION of the connection": (
        lambda b: frame(frames.HEADERS, 0, 1, b.block()) + frame(frames.CONTINUATION, 4, 0, b.block()),
        PROTOCOL,
    ),
    "6.10/4 CONTINUATION after whole HEADERS": (lambda b: b.open(1) + continuation(True), PROTOCOL, 1),
    "6.10/5 CONTINUATION after the last": (
        lambda b: frame(frames.HEADERS, 0, 1, b.block()) + continuation(True) + continuation(True),
        PROTOCOL,
        1,
    ),
    "6.10/6 CONTINUATION after DATA": (
        lambda b: b.open(1) + b.body(1, end=False) + continuation(True),
        PROTOCOL,
        1,
    ),
}
RESET = {
    "6.1/2 DATA on a stream whose client has ended": (
        lambda b: b.half_closed(1) + frame(frames.DATA, 1, 1, b"test"),
        ErrorCodes.STREAM_CLOSED,
    ),
    "6.3/2 PRIORITY of another size": (lambda b: b.open(1) + frame(frames.PRIORITY, 0, 1, bytes(4)), SIZE),
    "6.9/2 WINDOW_UPDATE of a stream by nothing": (lambda b: b.half_closed(1) + frames.window_update(1, 0), PROTOCOL),
    "6.9.1/3 a stream's window beyond the largest": (
        lambda b: b.half_closed(1) + frames.window_update(1, 2**31 - 1) * 2,
        FLOW,
    ),
}
ANSWERED = {
    "6.5.2/5 a setting that is not known": lambda b: frames.settings([(0xFF, 1)]) + b.echo(1),
    "6.5.2 ENABLE_PUSH of 0 and 1": lambda b: frames.settings([(2, 0), (2, 1)]) + b.echo(1),
    "6.5.2 HEADER_TABLE_SIZE of 0": lambda b: frames.settings([(1, 0)]) + b.echo(1),
    "6.7/2 PING that acknowledges": lambda b: frame(frames.PING, frames.ACK, 0, b"invalid.") + b.echo(1),
    "6.8 GOAWAY with a reason": lambda b: b.headers(1) + frame(frames.GOAWAY, 0, 0, bytes(8) + b"bye") + b.body(1),
    "6.10/1 several CONTINUATION": lambda b: frames.header_frames(1, b.block(), 30) + b.body(1),
}


@pytest.mark.parametrize("name", FAILING)
async def test_what_ends_the_connection(peer, build, name) -> None:
    make, *expected = FAILING[name]
    await peer.fails(make(build), *expected)


@pytest.mark.parametrize("name", RESET)
async def test_what_ends_the_stream(peer, build, name) -> None:
    make, code = RESET[name]
    await peer.resets(make(build), code)
    await peer.answers(build.echo(3))


@pytest.mark.parametrize("name", ANSWERED)
async def test_what_is_answered(peer, build, name) -> None:
    await peer.answers(ANSWERED[name](build))


async def test_6_5_3_1_of_a_setting_that_comes_twice_the_last_counts(peer, build) -> None:
    peer.send(frames.settings([(UPDATE, 100), (UPDATE, 1)]) + build.echo(1))
    assert await data_sizes(peer, 1) == [1]


async def test_6_5_3_2_settings_are_acknowledged(peer) -> None:
    assert await peer.sent_back(frames.settings([(UPDATE, 0)])) == [(frames.SETTINGS, frames.ACK, 0, b"")]


async def test_6_7_1_a_ping_is_answered_with_what_it_says(peer) -> None:
    assert await peer.sent_back(frame(frames.PING, 0, 0, b"h2spec..")) == [(frames.PING, frames.ACK, 0, b"h2spec..")]


async def test_6_9_1_1_a_window_of_one_byte_is_kept_to(peer, build) -> None:
    peer.send(frames.settings([(UPDATE, 1)]) + build.echo(1))
    assert await data_sizes(peer, 1) == [1]


async def test_6_9_2_1_a_window_that_grows_lets_open_streams_go_on(peer, build) -> None:
    peer.send(frames.settings([(UPDATE, 0)]) + build.echo(1))
    assert await data_sizes(peer, 1) == []
    peer.send(frames.settings([(UPDATE, 1)]))
    assert await data_sizes(peer, 1) == [1]


async def test_6_9_2_2_a_window_that_became_negative_is_made_up_for_first(peer, build) -> None:
    peer.send(frames.settings([(UPDATE, 3)]) + build.echo(1))
    assert await data_sizes(peer, 1) == [3]
    peer.send(frames.settings([(UPDATE, 2)]) + frames.window_update(1, 2))
    assert await data_sizes(peer, 1) == [1]


async def data_sizes(peer, stream: int) -> list[int]:
    """Sizes of the DATA that come, until the server has had its turns to send them."""
    found = []
    for _ in range(5):  # the call's task answers in a turn of its own
        found += await peer.sent_back(b"")
    return [len(payload) for kind, _, number, payload in found if (kind, number) == (frames.DATA, stream)]
