"""RFC 9113, 3.4 (the preface) and 4 (frames)."""

from __future__ import annotations

import asyncio

import pytest
from h2.errors import ErrorCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame

TOO_LARGE = bytes(frames.USUAL_FRAME + 1)
ANSWERED = {
    "4.1/1 an unknown kind of frame": lambda b: frame(0x16, 0, 0, bytes(8)) + b.echo(1),
    "4.1/2 flags that are not defined": lambda b: frame(frames.PING, 0x16, 0, bytes(8)) + b.echo(1),
    "4.1/3 the reserved bit": lambda b: b.headers(1) + frame(frames.DATA, 1, 1 | 1 << 31, b.message(b"a")),
    "4.2/1 DATA of 16 384 bytes": lambda b: b.headers(1) + b.body(1, bytes(frames.USUAL_FRAME - 5)),
    "4.3 a block in frames of one byte": lambda b: frames.header_frames(1, b.block(), 1) + b.body(1),
}
FAILING = {
    "4.2/2 DATA too large": (lambda b: b.open(1) + frame(frames.DATA, 0, 1, TOO_LARGE), ErrorCodes.FRAME_SIZE_ERROR, 1),
    "4.2/3 HEADERS too large": (
        lambda b: frame(frames.HEADERS, frames.END_HEADERS, 1, TOO_LARGE),
        ErrorCodes.FRAME_SIZE_ERROR,
    ),
    "4.2 an unknown frame too large": (lambda b: frame(0xFA, 0, 0, TOO_LARGE), ErrorCodes.FRAME_SIZE_ERROR),
    "4.3/1 a header block that is none": (
        lambda b: frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x40"),
        ErrorCodes.COMPRESSION_ERROR,
    ),
    "4.3/2 PRIORITY within a header block": (
        lambda b: frame(frames.HEADERS, 0, 1, b.block()) + frame(frames.PRIORITY, 0, 1, bytes(5)),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "4.3/3 HEADERS of another stream within a header block": (
        lambda b: frame(frames.HEADERS, 0, 1, b.block()) + b.headers(3),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "4.3 a broken block of a stream that is over": (
        lambda b: b.open(1) + frames.reset(1, 8) + frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x40"),
        ErrorCodes.COMPRESSION_ERROR,
        1,
    ),
}
NO_SETTINGS = {
    "PING": frame(frames.PING, 0, 0, bytes(8)),
    "HEADERS": frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x88"),
    "WINDOW_UPDATE": frames.window_update(0, 1),
    "an acknowledgement": frame(frames.SETTINGS, frames.ACK, 0),
    "an unknown frame": frame(0xFA, 0, 0),
}


async def test_3_4_1_the_preface_is_answered_with_settings_first(stranger) -> None:
    stranger.send(frames.PREFACE + frames.settings(()))
    assert [(await stranger.next())[:2] for _ in range(3)] == [
        (frames.SETTINGS, 0),
        (frames.WINDOW_UPDATE, 0),
        (frames.SETTINGS, frames.ACK),
    ]


@pytest.mark.parametrize(
    "sent", [b"INVALID CONNECTION PREFACE\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\x00", bytes(24)]
)
async def test_3_4_2_another_preface_ends_the_connection(stranger, sent) -> None:
    stranger.send(sent)
    kinds = []
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        while True:
            kinds.append((await stranger.next())[0])
    assert frames.PING not in kinds


@pytest.mark.parametrize("name", NO_SETTINGS)
async def test_3_4_the_first_frame_must_be_settings(stranger, name) -> None:
    await stranger.fails(frames.PREFACE + NO_SETTINGS[name], ErrorCodes.PROTOCOL_ERROR)


async def test_3_4_the_preface_may_come_in_pieces(stranger) -> None:
    for byte in frames.PREFACE + frames.settings(()):
        stranger.send(bytes((byte,)))
        await asyncio.sleep(0)
    await stranger.ignores(b"")


@pytest.mark.parametrize("name", ANSWERED)
async def test_what_is_answered(peer, build, name) -> None:
    await peer.answers(ANSWERED[name](build))


@pytest.mark.parametrize("name", FAILING)
async def test_what_ends_the_connection(peer, build, name) -> None:
    make, *expected = FAILING[name]
    await peer.fails(make(build), *expected)
