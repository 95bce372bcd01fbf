"""A connection of the HTTP/2 server on a socket that only keeps what is written, and the frames that it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from h2.errors import ErrorCodes

from sapwood_common.errors import SapwoodError
from sapwood_net.http2.server.connection import MOST_STREAMS, ServerConnection
from sapwood_net.http2.server.limits.lifetime import Timeouts
from sapwood_net.http2.server.limits.shared import SharedLimits, StreamTotal
from sapwood_net.http2.server.stream import ServerStream
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import ConnectionFailedError
from sapwood_net.http2.wire.header_reader import Headers
from sapwood_net.http2.wire.request_head import RequestHead
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.tarpit import Tarpit
from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.pacing.write_batch import WriteBatch

SERVICE = "test.Test"
Frame = tuple[int, int, int, bytes]
"""Kind, flags, stream and payload."""


def split_frames(data: bytes) -> tuple[list[Frame], bytes]:
    """Whole frames as (kind, flags, stream, payload), and what is left."""
    found: list[Frame] = []
    at = 0
    while len(data) - at >= 9 and len(data) - at - 9 >= (size := int.from_bytes(data[at : at + 3], "big")):
        stream = int.from_bytes(data[at + 5 : at + 9], "big")
        found.append((data[at + 3], data[at + 4], stream, data[at + 9 : at + 9 + size]))
        at += 9 + size
    return found, data[at:]


def request_block(method: str = "Echo", *more: tuple[str, str]) -> bytes:
    """A call's header block, without memory of others."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{method}"), (":authority", "x")]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), *more]
    return b"".join(frames.literal(name.encode(), value.encode()) for name, value in fields)


def message(body: bytes, compressed: bool = False) -> bytes:
    """A gRPC message with its prefix."""
    return bytes((compressed,)) + len(body).to_bytes(4, "big") + body


def unhurried() -> TimeShare:
    """Nobody has to stop: what is sent to a Wire is taken before it continues."""
    return TimeShare(lambda: 0.0)


class AtOnce(WriteBatch):
    """Gathers nothing: what a Wire is answered is there before its loop continues, or where there is none."""

    def add(self, transport: asyncio.Transport, data: bytes) -> None:
        if not transport.is_closing():
            transport.write(data)


class FakeTransport(asyncio.Transport):
    """A socket that keeps what is written.

    Attributes:
        written: All of it.
        closed: Whether it was closed or aborted.
        aborted: Whether it was aborted.
        reading: Whether it is read.
        unread: What ``get_write_buffer_size`` says.
        protocol: Whom it was given to last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = self.aborted = False
        self.reading = True
        self.unread = 0
        self.protocol: asyncio.BaseProtocol | None = None
        self.on_write: Callable[[], None] | None = None

    def write(self, data: Any) -> None:
        self.written += data
        if self.on_write is not None:
            self.on_write()

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


class Recorder:
    """A StreamReceiver that keeps what it is told, and echoes if it may."""

    def __init__(self, stream: ServerStream, headers: Headers, echo: bool) -> None:
        self.stream = stream
        self.headers = headers
        self.messages: list[tuple[bytes, bool]] = []
        self.refused: list[int] = []
        self.overload: SapwoodError | None = None
        self.ended = self.left = 0
        self.echo = echo
        if echo:
            stream.send_headers(frames.STATUS_200)

    def received(self, message: bytes, compressed: bool) -> None:
        self.messages.append((message, compressed))
        if self.echo:
            self.stream.taken(len(message))
            self.stream.write(message)

    def too_large(self, size: int) -> None:
        self.refused.append(size)

    def overloaded(self, error: SapwoodError) -> None:
        self.overload = error
        self.stream.reset(ErrorCodes.CANCEL)

    def half_closed(self) -> None:
        self.ended += 1
        if self.echo:
            self.stream.finish(frames.literal(b"grpc-status", b"0"))

    def gone(self) -> None:
        self.left += 1


class Wire:
    """A connection on a fake socket, past its greeting.

    Attributes:
        calls: What began, by stream.
        failed: Why it was closed.
    """

    def __init__(
        self,
        most_bytes: int = 1 << 20,
        *,
        echo: bool = False,
        greet: bool = True,
        share: TimeShare | None = None,
        most_streams: int = MOST_STREAMS,
        total: StreamTotal | None = None,
        memory: BodyMemory | None = None,
        shared: SharedLimits | None = None,
        stranger: bool = False,
    ) -> None:
        self.transport = FakeTransport()
        self.calls: dict[int, Recorder] = {}
        self.echo = echo
        self.failed: list[ConnectionFailedError] = []
        self.connection = ServerConnection(
            self,
            most_bytes,
            most_streams,
            shared
            or SharedLimits(
                memory or BodyMemory(1 << 30),
                share or unhurried(),
                writes=AtOnce(),
                strangers=share or unhurried(),
                calls=total or StreamTotal(),
                tarpit=Tarpit(0),
            ),
            Timeouts(),
            stranger=stranger,
        )
        self.connection.connection_made(self.transport)
        if greet:
            self.send(frames.PREFACE + frames.settings(()))
            self.answers()

    def connection_made(self, connection: ServerConnection) -> None:
        pass

    def connection_lost(self, connection: ServerConnection) -> None:
        pass

    def connection_failed(self, connection: ServerConnection, error: ConnectionFailedError) -> None:
        self.failed.append(error)

    def open_call(self, connection: ServerConnection, stream: ServerStream, head: RequestHead) -> None:
        self.calls[stream.number] = recorder = Recorder(stream, head.headers, self.echo)
        stream.follow(recorder)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def open(self, stream: int, *, end: bool = False) -> Recorder:
        self.send(frames.header_frames(stream, request_block(), frames.USUAL_FRAME, end=end))
        return self.calls[stream]

    def answers(self) -> list[Frame]:
        """The frames since the last call."""
        found, rest = split_frames(bytes(self.transport.written))
        assert not rest
        self.transport.written.clear()
        return found

    def data_sent(self) -> dict[int, int]:
        """Bytes of DATA by stream since the last call."""
        sizes: dict[int, int] = {}
        for kind, _, stream, payload in self.answers():
            if kind == frames.DATA:
                sizes[stream] = sizes.get(stream, 0) + len(payload)
        return sizes

    def pause(self) -> None:
        self.connection.pause_writing()

    def resume(self) -> None:
        self.connection.resume_writing()
