"""HTTP/2 as bytes, and a client of it that costs next to nothing: what is measured is the server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from sapwood_net.http2.wire import frames

HEALTH = "/grpc.health.v1.Health/Check"
GENERATE = "/sapwood.v1.Router/Generate"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
GREETING = frames.PREFACE + frames.settings(())


def call_block(path: str, *more: tuple[str, str]) -> bytes:
    """The header block of a call; no table is used."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    fields += [("content-type", "application/grpc"), *more]
    return b"".join(frames.literal(name.encode(), value.encode()) for name, value in fields)


def call_headers(stream: int, block: bytes, *, end: bool = False) -> bytes:
    """The frame that opens a call, or the frames."""
    return frames.header_frames(stream, block, frames.USUAL_FRAME, end=end)


def message(body: bytes) -> bytes:
    """A gRPC message with its prefix."""
    return b"\0%b%b" % (len(body).to_bytes(4, "big"), body)


def call(stream: int, block: bytes, body: bytes) -> bytes:
    """A whole unary call."""
    return call_headers(stream, block) + frames.frame(frames.DATA, frames.END_STREAM, stream, message(body))


def streams(first: int = 1) -> Iterable[int]:
    """The numbers of a client's streams."""
    return range(first, 1 << 31, 2)


def client_tls(alpn: str | None) -> ssl.SSLContext:
    """Of clients that check nothing: handshakes cost them little, so that the server's cost shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    return context


@dataclass(frozen=True)
class Farewell:
    """What a GOAWAY says."""

    code: int
    text: str


def find_farewell(tail: bytes) -> Farewell | None:
    """The last GOAWAY in the last bytes of a connection."""
    at = tail.rfind(b"\x07\0\0\0\0\0")
    if at < 3 or len(tail) < at + 14:
        return None
    size = int.from_bytes(tail[at - 3 : at], "big")
    payload = tail[at + 6 : at + 6 + size]
    return Farewell(int.from_bytes(payload[4:8], "big"), payload[8:].decode("utf-8", "replace"))


class CallFailedError(Exception):
    """A call has no answer, or a bad one."""


class Http2Client:
    """One connection, one call at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next = 1

    @classmethod
    async def connect(cls, port: int, tls: ssl.SSLContext | None) -> Http2Client:
        """Connects and greets."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port, ssl=tls))
        client._writer.write(GREETING)
        return client

    async def call(self, block: bytes, body: bytes) -> None:
        """A call whose answer is read to its end.

        Raises:
            CallFailedError: It ended otherwise than well.
        """
        stream, self._next = self._next, self._next + 2
        self._writer.write(call(stream, block, body))
        data = 0
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, number = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == frames.DATA:
                data += len(payload)
            elif kind == frames.PING and not flags & frames.ACK:
                self._writer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
            elif kind == frames.SETTINGS and not flags & frames.ACK:
                self._writer.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
            elif kind == frames.GOAWAY:
                raise CallFailedError(f"GOAWAY {payload[4:]!r}")
            if number != stream:
                continue
            if kind == frames.RST_STREAM:
                raise CallFailedError(f"reset with {payload.hex()}")
            if flags & frames.END_STREAM and kind in (frames.HEADERS, frames.DATA):
                break
        if not data:
            raise CallFailedError(f"ended without a message: {payload[-80:]!r}")
        self._writer.write(frames.window_update(0, data))

    def close(self) -> None:
        """At once."""
        self._writer.transport.abort()
