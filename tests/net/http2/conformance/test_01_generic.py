"""What any client does, and is answered: h2spec's generic cases 1 to 5."""

from __future__ import annotations

import pytest

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame

END = frames.END_STREAM


def literal(first: int, name: bytes, value: bytes) -> bytes:
    """A header field in one of HPACK's forms, with a name of its own."""
    return bytes((first, len(name))) + name + bytes((len(value),)) + value


def after(block: bytes):
    """A call whose header fields end with ``block``."""
    return lambda b: frame(frames.HEADERS, frames.END_HEADERS, 1, b.block() + block) + b.body(1)


ANSWERED = {
    "2/1 PRIORITY on an idle stream": lambda b: frame(frames.PRIORITY, 0, 1, bytes(5)) + b.echo(1),
    "2/5 PRIORITY on a closed stream": lambda b: (
        b.open(1) + frames.reset(1, 8) + frame(frames.PRIORITY, 0, 1, bytes(5)) + b.echo(3)
    ),
    "3.1/1 DATA": lambda b: b.headers(1) + b.body(1),
    "3.1/2 several DATA": lambda b: (
        b.headers(1)
        + b"".join(frame(frames.DATA, 0, 1, part) for part in (b"\0", b"\0\0\0", b"", b"\1a"))
        + frame(frames.DATA, END, 1)
    ),
    "3.1/3 DATA with padding": lambda b: (
        b.headers(1) + frame(frames.DATA, frames.PADDED | END, 1, b"\x03" + b.message(b"x") + bytes(3))
    ),
    "3.2/1 HEADERS": lambda b: b.echo(1),
    "3.2/2 HEADERS with padding": lambda b: (
        frame(frames.HEADERS, frames.PADDED | frames.END_HEADERS, 1, b"\x05" + b.block() + bytes(5)) + b.body(1)
    ),
    "3.2/3 HEADERS with a priority": lambda b: (
        frame(frames.HEADERS, frames.WITH_PRIORITY | frames.END_HEADERS, 1, bytes(4) + b"\xff" + b.block()) + b.body(1)
    ),
    "3.3/1 PRIORITY 1": lambda b: b.open(1) + frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\0") + b.body(1),
    "3.3/2 PRIORITY 256": lambda b: b.open(1) + frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\xff") + b.body(1),
    "3.3/3 PRIORITY with a dependency": lambda b: (
        b.open(1) + frame(frames.PRIORITY, 0, 3, b"\0\0\0\x01\x10") + b.echo(3)
    ),
    "3.3/4 PRIORITY that excludes": lambda b: b.open(1) + frame(frames.PRIORITY, 0, 3, b"\x80\0\0\x01\x10") + b.echo(3),
    "3.3/5 PRIORITY of an idle stream, then a lower one": lambda b: (
        frame(frames.PRIORITY, 0, 9, b"\0\0\0\x01\x10") + b.echo(5)
    ),
    "3.4/1 RST_STREAM": lambda b: b.open(1) + frames.reset(1, 8) + b.echo(3),
    "3.5/1 SETTINGS": lambda b: frames.settings(((3, 100), (4, 70_000))) + b.echo(1),
    "3.7/1 PING": lambda b: frame(frames.PING, 0, 0, bytes(8)) + b.echo(1),
    "3.8/1 GOAWAY": lambda b: b.headers(1) + frame(frames.GOAWAY, 0, 0, bytes(8)) + b.body(1),
    "3.9/1 WINDOW_UPDATE of the connection": lambda b: frames.window_update(0, 1) + b.echo(1),
    "3.9/2 WINDOW_UPDATE of a stream": lambda b: b.headers(1) + frames.window_update(1, 1) + b.body(1),
    "3.10/1 CONTINUATION": lambda b: (
        frame(frames.HEADERS, 0, 1, b.block()[:10])
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, b.block()[10:])
        + b.body(1)
    ),
    "3.10/2 several CONTINUATION": lambda b: frames.header_frames(1, b.block(), 7) + b.body(1),
    "4/3 POST": lambda b: b.echo(1),
    "4/4 POST with trailers": lambda b: (
        b.headers(1) + b.body(1, end=False) + frames.header_frames(1, frames.literal(b"x-trailer", b"1"), 100, end=True)
    ),
    "5/1 indexed field": after(b"\x90"),  # accept-encoding: gzip, deflate
    "5/2 literal with indexing, indexed name": after(b"\x7a\x01a"),  # user-agent
    "5/3 literal with indexing, new name": after(literal(0x40, b"x-new", b"a")),
    "5/4 literal without indexing, indexed name": after(b"\x0f\x2b\x01a"),
    "5/5 literal without indexing, new name": after(literal(0x00, b"x-new", b"a")),
    "5/6 literal never indexed, indexed name": after(b"\x1f\x2b\x01a"),
    "5/7 literal never indexed, new name": after(literal(0x10, b"x-new", b"a")),
    "5/8 update of the table's size": lambda b: (
        frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x20\x3f\xe1\x1f" + b.block()) + b.body(1)
    ),
    "5/9 Huffman, with indexing": after(b"\x7a\x81\x1f"),
    "5/10 Huffman, with indexing, new name": after(b"\x40\x81\xf3\x81\x1f"),
    "5/11 Huffman, without indexing": after(b"\x0f\x2b\x81\x1f"),
    "5/12 Huffman, without indexing, new name": after(b"\x00\x81\xf3\x81\x1f"),
    "5/13 Huffman, never indexed": after(b"\x1f\x2b\x81\x1f"),
    "5/14 Huffman, never indexed, new name": after(b"\x10\x81\xf3\x81\x1f"),
    "5/15 a field of the table": after(literal(0x40, b"x-new", b"a") + b"\xbe"),
}
CLIENTS_SIDE_IS_OVER = {
    "2/2 WINDOW_UPDATE on a half-closed (remote) stream": frames.window_update(1, 100),
    "2/3 PRIORITY on a half-closed (remote) stream": frame(frames.PRIORITY, 0, 1, bytes(5)),
}


async def test_1_1_the_preface_is_answered_with_settings(stranger) -> None:
    stranger.send(frames.PREFACE + frames.settings(()))
    assert (await stranger.next())[:3] == (frames.SETTINGS, 0, 0)


@pytest.mark.parametrize("name", ANSWERED)
async def test_calls_are_answered(peer, build, name) -> None:
    await peer.answers(ANSWERED[name](build))


@pytest.mark.parametrize("name", CLIENTS_SIDE_IS_OVER)
async def test_frames_that_a_half_closed_stream_takes(running, peer, build, name) -> None:
    await peer.ignores(build.half_closed(1) + CLIENTS_SIDE_IS_OVER[name])
    running.service.release.set()
    assert (await peer.status(1))["grpc-status"] == "0"


async def test_2_4_a_half_closed_stream_may_be_reset(running, peer, build, until) -> None:
    await peer.ignores(build.half_closed(1))
    await until(lambda: running.service.started)
    await peer.ignores(frames.reset(1, 8))
    await until(lambda: running.service.finished == ["Wait"])


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_4_1_and_4_2_other_methods_are_told_that_there_is_only_post(peer, build, method) -> None:
    block = build.block().replace(b"\x04POST", bytes((len(method),)) + method)
    peer.send(frames.header_frames(1, block, frames.USUAL_FRAME, end=True))
    assert await peer.status(1) == {":status": "405", "allow": "POST"}
