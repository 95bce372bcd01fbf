"""RFC 9113, 7 (error codes) and 8 (requests): what is malformed reaches no handler and resets its stream, and no other."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame, literal

PATH = b"/test.Test/Echo"
PSEUDO = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH), (b":authority", b"x"))
REGULAR = ((b"te", b"trailers"), (b"content-type", b"application/grpc"))


def block(*fields: tuple[bytes, bytes]) -> bytes:
    return b"".join(literal(name, value) for name, value in fields)


def without(name: bytes) -> bytes:
    return block(*(field for field in PSEUDO if field[0] != name), *REGULAR)


def replaced(name: bytes, value: bytes) -> bytes:
    return block(*((found, value if found == name else old) for found, old in PSEUDO), *REGULAR)


def more(name: bytes, value: bytes) -> bytes:
    return block(*PSEUDO, *REGULAR, (name, value))


MALFORMED = {
    "8.2/1 a capital in a name": more(b"X-Test", b"ok"),
    "8.2.1 an empty name": more(b"", b"ok"),
    "8.2.1 a space in a name": more(b"x test", b"ok"),
    "8.2.1 a colon within a name": more(b"x:test", b"ok"),
    "8.2.1 a comma in a name": more(b"x,test", b"ok"),
    "8.2.1 a letter beyond ASCII in a name": more(b"x-t\xe9st", b"ok"),
    "8.2.1 a line end in a name": more(b"x\ntest", b"ok"),
    "8.2.1 a delete character in a name": more(b"x\x7f", b"ok"),
    "8.2.1 a line feed in a value": more(b"x-test", b"a\nb"),
    "8.2.1 a carriage return in a value": more(b"x-test", b"a\rb"),
    "8.2.1 a zero byte in a value": more(b"x-test", b"a\0b"),
    "8.2.1 a value that is a line feed": more(b"x-test", b"\n"),
    "8.2.1 a space before a value": more(b"x-test", b" ok"),
    "8.2.1 a space after a value": more(b"x-test", b"ok "),
    "8.2.1 a tab before a value": more(b"x-test", b"\tok"),
    "8.2.1 a tab after a value": more(b"x-test", b"ok\t"),
    "8.2.1 a line feed in the path": replaced(b":path", PATH + b"\n"),
    "8.2.2/1 connection": more(b"connection", b"keep-alive"),
    "8.2.2 proxy-connection": more(b"proxy-connection", b"keep-alive"),
    "8.2.2 keep-alive": more(b"keep-alive", b"5"),
    "8.2.2 transfer-encoding": more(b"transfer-encoding", b"chunked"),
    "8.2.2 upgrade": more(b"upgrade", b"h2c"),
    "8.2.2/2 te other than trailers": block(*PSEUDO, (b"te", b"trailers, deflate"), REGULAR[1]),
    "8.2.2 te twice, once wrong": block(*PSEUDO, (b"te", b"gzip"), *REGULAR),
    "8.3/1 an unknown pseudo-header": block(*PSEUDO, (b":test", b"ok"), *REGULAR),
    "8.3 a pseudo-header that is only a colon": block(*PSEUDO, (b":", b"ok"), *REGULAR),
    "8.3/2 a response's pseudo-header": block(*PSEUDO, (b":status", b"200"), *REGULAR),
    "8.3/4 a pseudo-header after other fields": block(*PSEUDO[:3], *REGULAR, PSEUDO[3]),
    "8.3.1/1 an empty path": replaced(b":path", b""),
    "8.3.1/2 no method": without(b":method"),
    "8.3.1/3 no scheme": without(b":scheme"),
    "8.3.1/4 no path": without(b":path"),
    "8.3.1/5 two methods": block(PSEUDO[0], *PSEUDO, *REGULAR),
    "8.3.1/6 two schemes": block(PSEUDO[1], *PSEUDO, *REGULAR),
    "8.3.1/7 two paths": block(PSEUDO[2], *PSEUDO, *REGULAR),
    "8.3.1 two authorities": block(PSEUDO[3], *PSEUDO, *REGULAR),
    "8.3.1 a path that is none": replaced(b":path", b"test"),
    "8.3.1 an asterisk that is no OPTIONS": replaced(b":path", b"*"),
    "8.3.1 host and authority differ": more(b"host", b"y"),
    "8.3.1 no fields at all": b"",
    "8.5 CONNECT with a path": replaced(b":method", b"CONNECT"),
    "8.1.1 content-length that is no number": more(b"content-length", b"-1"),
    "8.1.1 content-length that is two numbers": block(
        *PSEUDO, *REGULAR, (b"content-length", b"9"), (b"content-length", b"8")
    ),
    "8.1.1 content-length that is a list": more(b"content-length", b"9, 9"),
    "8.1.1 content-length without end": more(b"content-length", b"9" * 5000),
}
"""Header blocks; the call's message comes after them, of 9 bytes of DATA."""
TRAILERS = {
    "8.1/3 a pseudo-header": block((b":method", b"POST")),
    "8.1 a capital": block((b"X-Test", b"ok")),
    "8.1 a line feed": block((b"x-test", b"a\nb")),
    "8.1 a field of HTTP/1": block((b"connection", b"close")),
}
WRONG_LENGTH = {
    "8.1.1/1 DATA of another length": lambda b: length(b, 1) + b.body(1),
    "8.1.1/2 several DATA of another length": lambda b: length(b, 1) + b.body(1, end=False) + b.body(1),
    "8.1.1 DATA that is too much": lambda b: length(b, 8) + b.body(1, end=False),
    "8.1.1 DATA that is too little": lambda b: length(b, 10) + b.body(1),
    "8.1.1 trailers after too little DATA": lambda b: (
        length(b, 10) + b.body(1, end=False) + frames.header_frames(1, block((b"x", b"y")), 100, end=True)
    ),
    "8.1.1 no DATA": lambda b: b.headers(1, ("content-length", "9"), end=True),
    "8.1.1 nothing was to come": lambda b: length(b, 0) + b.body(1),
}
ANSWERED = {
    "8.1.1 DATA of the length": lambda b: length(b, 9) + b.body(1),
    "8.1.1 several DATA of the length, padded": lambda b: (
        length(b, 9)
        + frame(frames.DATA, frames.PADDED, 1, b"\x03" + b.message(b"body")[:7] + bytes(3))
        + frame(frames.DATA, frames.END_STREAM, 1, b.message(b"body")[7:])
    ),
    "8.1.1 a length that is said twice": lambda b: (
        frames.header_frames(1, b.block(("content-length", "9"), ("content-length", "9")), 999) + b.body(1)
    ),
    "8.2.1 an empty value": lambda b: b.echo(1, ("x-test", "")),
    "8.2.1 a space within a value": lambda b: b.echo(1, ("x-test", "a \t b")),
    "8.2.3 several cookies": lambda b: b.echo(1, ("cookie", "a=b"), ("cookie", "c=d")),
    "8.3.1 host and authority are the same": lambda b: b.echo(1, ("host", "X")),
    "8.3.1 no authority": lambda b: frames.header_frames(1, without(b":authority"), 999) + b.body(1),
    "7/1 GOAWAY with an unknown code": lambda b: (
        b.headers(1) + frame(frames.GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff") + b.body(1)
    ),
    "7/2 RST_STREAM with an unknown code": lambda b: b.open(1) + frames.reset(1, 0xFF) + b.echo(3),
}


def length(b, number: int) -> bytes:
    """HEADERS of a call that say how much DATA is to come; a message of ``Build.body`` has 9 bytes."""
    return b.headers(1, ("content-length", str(number)))


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_requests_are_refused(running, peer, build, name) -> None:
    """Also when they come again, and are known."""
    for stream in (1, 3, 5):
        head = frames.header_frames(stream, MALFORMED[name], frames.USUAL_FRAME)
        await peer.resets(head + build.body(stream), ErrorCodes.PROTOCOL_ERROR, stream)
    await peer.answers(build.echo(7))
    assert [dict(running.service.metadata).get("x-test")] == [None]  # of the last call alone


@pytest.mark.parametrize("name", TRAILERS)
async def test_malformed_trailers_are_refused(running, peer, build, name) -> None:
    data = build.headers(1, method="Listen") + build.body(1, end=False)
    await peer.resets(data + frames.header_frames(1, TRAILERS[name], 100, end=True), ErrorCodes.PROTOCOL_ERROR)
    await peer.answers(build.echo(3))


async def test_8_1_1_trailers_that_do_not_end_the_stream_are_refused(peer, build) -> None:
    await peer.resets(build.open(1) + build.headers(1), ErrorCodes.PROTOCOL_ERROR)
    await peer.answers(build.echo(3))


@pytest.mark.parametrize("name", WRONG_LENGTH)
async def test_content_of_another_length_is_refused(peer, build, name) -> None:
    await peer.resets(WRONG_LENGTH[name](build), ErrorCodes.PROTOCOL_ERROR)
    await peer.answers(build.echo(3))


@pytest.mark.parametrize("name", ANSWERED)
async def test_what_is_answered(peer, build, name) -> None:
    await peer.answers(ANSWERED[name](build))


async def test_8_4_a_client_may_not_push(peer, build) -> None:
    await peer.fails(frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, bytes(4)), ErrorCodes.PROTOCOL_ERROR)


async def test_8_5_connect_is_told_that_there_is_only_post(peer) -> None:
    connect = block((b":method", b"CONNECT"), (b":authority", b"x:1"))
    peer.send(frames.header_frames(1, connect, 999))
    assert (await peer.status(1))[":status"] == "405"
