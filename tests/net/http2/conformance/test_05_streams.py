"""RFC 9113, 5: what a stream takes in each of its states, ids, concurrency, errors."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame

BLOCK = frames.literal(b"x-trailer", b"1")
TRAILERS = frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, BLOCK)
CONTINUATION = frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK)
CLOSED = ErrorCodes.STREAM_CLOSED
PROTOCOL = ErrorCodes.PROTOCOL_ERROR


def is_reset(b) -> bytes:
    return b.open(1) + frames.reset(1, ErrorCodes.CANCEL)


FAILING = {
    "5.1/1 idle: DATA": (lambda b: frame(frames.DATA, frames.END_STREAM, 1, b"test"), PROTOCOL),
    "5.1/2 idle: RST_STREAM": (lambda b: frames.reset(1, ErrorCodes.CANCEL), PROTOCOL),
    "5.1/3 idle: WINDOW_UPDATE": (lambda b: frames.window_update(1, 100), PROTOCOL),
    "5.1/4 idle: CONTINUATION": (lambda b: CONTINUATION, PROTOCOL),
    "5.1 idle: WINDOW_UPDATE on an even stream": (lambda b: b.open(5) + frames.window_update(2, 100), PROTOCOL, 5),
    "5.1 idle: RST_STREAM on an even stream": (lambda b: b.open(5) + frames.reset(2, 8), PROTOCOL, 5),
    "5.1 idle: DATA on an even stream": (lambda b: b.open(5) + frame(frames.DATA, 0, 2, b"x"), PROTOCOL, 5),
    "5.1/7 half-closed (remote): CONTINUATION": (lambda b: b.half_closed(1) + CONTINUATION, PROTOCOL, 1),
    "5.1/9 reset: HEADERS": (lambda b: is_reset(b) + TRAILERS, CLOSED, 1),
    "5.1/10 reset: CONTINUATION": (lambda b: is_reset(b) + CONTINUATION, PROTOCOL, 1),
    "5.1.1/1 an even stream": (lambda b: b.headers(2), PROTOCOL),
    "5.1.1/2 a stream below one that was opened": (lambda b: b.open(5) + b.headers(3), PROTOCOL, 5),
    "5.4.1/1 a broken PING": (lambda b: frame(frames.PING, 0, 0, bytes(6)), ErrorCodes.FRAME_SIZE_ERROR),
    "5.4.1 the last stream that was opened is told": (
        lambda b: b.open(1) + b.half_closed(7) + frame(frames.PING, 0, 0, bytes(6)),
        ErrorCodes.FRAME_SIZE_ERROR,
        7,
    ),
    "5.5/2 an unknown frame within a header block": (
        lambda b: frame(frames.HEADERS, 0, 1, b.block()) + frame(0x16, 0, 0, bytes(8)),
        PROTOCOL,
    ),
    "5.3.1/2 PRIORITY of an idle stream that depends on itself": (
        lambda b: frame(frames.PRIORITY, 0, 1, b"\0\0\0\x01\xff"),
        PROTOCOL,
    ),
}
RESET = {
    "5.1/5 half-closed (remote): DATA": (lambda b: b.half_closed(1) + frame(frames.DATA, 1, 1, b"test"), CLOSED),
    "5.1/6 half-closed (remote): HEADERS": (lambda b: b.half_closed(1) + TRAILERS, CLOSED),
    "5.1/6 half-closed (remote): HEADERS that do not end": (
        lambda b: b.half_closed(1) + frame(frames.HEADERS, frames.END_HEADERS, 1, b.block()),
        CLOSED,
    ),
    "5.1/8 reset: DATA": (lambda b: is_reset(b) + frame(frames.DATA, frames.END_STREAM, 1, b"test"), CLOSED),
    "5.1/8 reset: DATA again and again is told once": (
        lambda b: is_reset(b) + frame(frames.DATA, 0, 1, b"test") * 5,
        CLOSED,
    ),
    "5.3.1/1 HEADERS that depend on their stream": (
        lambda b: frame(frames.HEADERS, frames.END_HEADERS | frames.WITH_PRIORITY, 1, b"\0\0\0\x01\xff" + b.block()),
        PROTOCOL,
    ),
    "5.3.1/1 HEADERS and CONTINUATION that depend on their stream": (
        lambda b: (
            frame(frames.HEADERS, frames.WITH_PRIORITY, 1, b"\x80\0\0\x01\xff" + b.block()[:9])
            + frame(frames.CONTINUATION, frames.END_HEADERS, 1, b.block()[9:])
        ),
        PROTOCOL,
    ),
    "5.3.1/2 PRIORITY of an open stream that depends on itself": (
        lambda b: b.open(1) + frame(frames.PRIORITY, 0, 1, b"\0\0\0\x01\xff"),
        PROTOCOL,
    ),
}
IGNORED = {
    "5.1 reset: WINDOW_UPDATE": lambda b: is_reset(b) + frames.window_update(1, 5),
    "5.1 reset: RST_STREAM": lambda b: is_reset(b) + frames.reset(1, 8),
    "5.1 reset: PRIORITY": lambda b: is_reset(b) + frame(frames.PRIORITY, 0, 1, bytes(5)),
}
IS_OVER = {
    "5.1/11 DATA": (frame(frames.DATA, frames.END_STREAM, 1, b"test"), "resets", CLOSED),
    "5.1/12 HEADERS": (TRAILERS, "fails", CLOSED),
    "5.1/13 CONTINUATION": (CONTINUATION, "fails", PROTOCOL),
}
ANSWERED = {"5.5/1 an unknown frame": lambda b: frame(0x16, 0xFF, 1, bytes(8)) + b.echo(1)}


@pytest.mark.parametrize("name", FAILING)
async def test_what_ends_the_connection(peer, build, name) -> None:
    make, *expected = FAILING[name]
    await peer.fails(make(build), *expected)


@pytest.mark.parametrize("name", RESET)
async def test_what_ends_the_stream(peer, build, name) -> None:
    make, code = RESET[name]
    await peer.resets(make(build), code)
    await peer.answers(build.echo(3))


@pytest.mark.parametrize("name", IGNORED)
async def test_what_changes_nothing(peer, build, name) -> None:
    await peer.ignores(IGNORED[name](build))
    await peer.answers(build.echo(3))


@pytest.mark.parametrize("name", ANSWERED)
async def test_what_is_answered(peer, build, name) -> None:
    await peer.answers(ANSWERED[name](build))


@pytest.mark.parametrize("name", IS_OVER)
async def test_what_a_stream_that_both_sides_have_ended_takes(peer, build, name) -> None:
    data, outcome, code = IS_OVER[name]
    await peer.answers(build.echo(1))
    if outcome == "fails":
        await peer.fails(data, code, 1)
    else:
        await peer.resets(data, code)


async def test_5_1_what_was_on_its_way_to_a_stream_that_ended_here_is_passed_over(peer, build) -> None:
    """The answer needs no message: it is 405 before the client has sent one, and trailers."""
    block = build.block().replace(b"\x04POST", b"\x03PUT")
    peer.send(frames.header_frames(1, block, frames.USUAL_FRAME))
    assert (await peer.status(1))[":status"] == "405"
    await peer.next()  # RST_STREAM NO_ERROR: what would follow is of no use
    await peer.ignores(build.body(1, bytes(9000), end=False) + build.body(1, end=False) + TRAILERS)
    await peer.answers(build.echo(3))


async def test_5_1_2_streams_beyond_those_allowed_are_refused(peer, build) -> None:
    beyond = 2 * peer.settings[SettingCodes.MAX_CONCURRENT_STREAMS] + 1
    block = build.block()
    peer.send(b"".join(frames.header_frames(stream, block, frames.USUAL_FRAME) for stream in range(1, beyond, 2)))
    await peer.resets(build.open(beyond), ErrorCodes.REFUSED_STREAM, beyond)
