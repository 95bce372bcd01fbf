"""One bidirectional gRPC call on an HTTP/2 connection of its own, carried by the event loop that uses it.

grpcio's asyncio API reads and writes on a thread of its own and wakes the event loop for each message, which costs about 160 us
of CPU time a message. Here the event loop reads and writes itself, for about 2 us a message besides the socket's own cost.
That pays for calls that last as long as the service, with a message a step; all others are grpcio's.

A graceful GOAWAY changes nothing: the call continues to its end, and its connection gets no other call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import cast
from urllib.parse import unquote

import grpc
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import HPACKError

from sapwood_net.http2.client.sending import Socket
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frame_reader import FrameReader
from sapwood_net.http2.wire.frames import ConnectionFailedError
from sapwood_net.http2.wire.header_reader import HeaderReader
from sapwood_net.http2.wire.message_reader import PREFIX, MessageReader, prefixed
from sapwood_net.http2.wire.peer_settings import PeerSettings

_STREAM = 1
"""The id of the connection's only stream."""
_WINDOW = 16 * 1024 * 1024
"""Bytes that the peer may send before it learns that they were taken."""
_DATA = b"%c\0%b" % (frames.DATA, _STREAM.to_bytes(4, "big"))
"""A DATA frame's header after its length: type, flags, stream."""
_CODES = {b"%d" % code.value[0]: code for code in grpc.StatusCode}
_OF_RESET: dict[int, grpc.StatusCode] = {
    ErrorCodes.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCodes.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCodes.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class CallEndedError(Exception):
    """The call is over.

    Attributes:
        code: Its status; OK if the service ended it well.
    """

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__("the service ended it" if code is grpc.StatusCode.OK else f"{code.name}: {details}")
        self.code = code


class DuplexCall(asyncio.Protocol):
    """One bidirectional gRPC call on a connection of its own. Implements ``FrameReceiver``.

    Life cycle: the protocol of a new connection; :meth:`read` for the first messages; :meth:`follow`; :meth:`close`.

    Args:
        authority: ``host:port``, for the headers.
        method: The method's path, ``/package.Service/Method``.
        secure: Whether the connection is TLS.
        most_bytes: The largest message taken.
    """

    def __init__(self, authority: str, method: str, *, secure: bool, most_bytes: int) -> None:
        fields = (
            (b":method", b"POST"),
            (b":scheme", b"https" if secure else b"http"),
            (b":path", method.encode()),
            (b":authority", authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"sapwood"),
        )
        self._request = b"".join(frames.literal(name, value) for name, value in fields)
        self._most_whole = min(frames.USUAL_FRAME, most_bytes)
        self._transport: asyncio.Transport | None = None
        self._unsent = bytearray()
        self._answers = b""
        """Acknowledgements, which leave before any message."""
        self._window = self._stream_window = frames.USUAL_WINDOW
        """Bytes that the peer takes on the connection, and on the stream."""
        self._consumed = 0
        """Bytes that the peer has sent, and whose receipt it has not learnt."""
        self._paused = False
        self._frames = FrameReader()
        self._headers = HeaderReader(dict)
        self._settings = PeerSettings()
        self._inbound = MessageReader(most_bytes)
        self._messages: deque[bytes] = deque()
        self._on_message: Callable[[bytes], None] = self._messages.append
        self._on_ready: Callable[[], None] | None = None
        self._answered = False
        self._end: CallEndedError | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def ended(self) -> bool:
        """Whether nothing is sent or received any more."""
        return self._end is not None

    @property
    def socket(self) -> Socket | None:
        """The connection's socket, to ask the kernel about it; None before there is one."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    @property
    def ready(self) -> bool:
        """Whether all that was written has gone to the socket. If not, further content is better sent as one message later."""
        return not self._unsent and not self._paused and self._end is None

    def write(self, message: bytes) -> None:
        """Sends a message, as soon as the connection takes it. After the end does nothing."""
        if self._end is not None:
            return
        size = PREFIX + len(message)
        most = min(self._window, self._stream_window, self._settings.frame_size)
        if self._unsent or self._paused or self._answers or size > most:
            self._unsent += prefixed(message)
            self._send()
            return
        assert self._transport is not None
        self._window -= size
        self._stream_window -= size
        self._transport.write(_whole_head(size) + message)

    async def read(self) -> bytes:
        """The next message.

        Raises:
            CallEndedError: The call ended, and there is no further message.
        """
        while not self._messages:
            if self._end is not None:
                raise self._end
            await self._change()
        return self._messages.popleft()

    def follow(self, on_message: Callable[[bytes], None], on_ready: Callable[[], None]) -> None:
        """Hands over all messages that were not read, and from now on each as it comes.

        Args:
            on_message: Must not raise; one that does ends the call.
            on_ready: Called when :attr:`ready` turns true again.
        """
        self._on_ready = on_ready
        self._on_message = on_message
        while self._messages:
            on_message(self._messages.popleft())

    def set_reading(self, reads: bool) -> None:
        """Whether what the peer sends is read; else it waits in the kernel, and then with the peer."""
        if self._transport is not None and not self._transport.is_closing():
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    async def answered(self) -> None:
        """Returns once the peer has greeted.

        Raises:
            CallEndedError: The call ended before that.
        """
        while not self._answered:
            if self._end is not None:
                raise self._end
            await self._change()

    async def wait_ended(self) -> CallEndedError:
        """Returns how the call ended, after its last message."""
        while self._end is None:
            await self._change()
        return self._end

    def close(self, reason: str = "closed here") -> None:
        """Ends the call and its connection, if that has not happened. May be called again."""
        if self._end is None and self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.reset(_STREAM, ErrorCodes.CANCEL))
        self._finish(grpc.StatusCode.CANCELLED, reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the call."""
        self._transport = cast(asyncio.Transport, transport)
        wanted = ((SettingCodes.ENABLE_PUSH, 0), (SettingCodes.INITIAL_WINDOW_SIZE, _WINDOW))
        self._transport.write(
            frames.PREFACE
            + frames.settings(wanted)
            + frames.window_update(0, _WINDOW)
            + frames.header_frames(_STREAM, self._request, frames.USUAL_FRAME)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(
            grpc.StatusCode.UNAVAILABLE, f"the connection broke: {exc}" if exc else "the connection was closed"
        )

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return
        if not self._frames.pending and not self._inbound.pending and self._take_whole(data):
            return
        try:
            self._frames.feed(data, self)
        except ConnectionFailedError as error:
            self._finish(grpc.StatusCode.INTERNAL, f"not HTTP/2 as it should be: {error}")
        if self._messages:
            self._tell_waiters()
        if self._end is None:
            self._flush()

    def eof_received(self) -> bool:
        """Lets the connection close."""
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._end is None:
            self._flush()
            self._tell_ready()

    def take_data(self, stream: int, payload: bytes, wire_bytes: int, ends: bool) -> None:
        if self._end is not None:
            return
        _check_known(self._answered and stream == _STREAM)
        self._consumed += wire_bytes
        for message, compressed in self._inbound.feed(payload):
            if compressed:
                self._finish(grpc.StatusCode.INTERNAL, "a message is compressed")
            if self._end is not None:
                return
            self._on_message(message)
        if self._inbound.refused is not None:
            self._finish(grpc.StatusCode.INTERNAL, f"a message of {self._inbound.refused} bytes is too large")
        elif ends:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "an end without a status")

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
        """Takes the response's first headers, or its trailers."""
        if self._end is not None:
            return
        _check_known(self._answered and stream == _STREAM)
        try:
            found = self._headers.read(block) or {}
        except HPACKError as error:
            raise ConnectionFailedError(ErrorCodes.COMPRESSION_ERROR, f"headers: {error}") from error
        if b"grpc-status" in found:
            code = _CODES.get(found[b"grpc-status"], grpc.StatusCode.UNKNOWN)
            self._finish(code, unquote(found.get(b"grpc-message", b"").decode("latin-1")))
        elif (status := found.get(b":status", b"200")) != b"200" and not status.startswith(b"1"):
            self._finish(grpc.StatusCode.UNAVAILABLE, f"HTTP status {status.decode('latin-1')}")
        elif ends:
            self._finish(grpc.StatusCode.INTERNAL, "it ended without a status")

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        if self._end is not None:
            return
        _check_known(self._answered or kind == frames.SETTINGS)
        if kind == frames.WINDOW_UPDATE:
            frames.check_size(payload, 4, stream <= _STREAM)
            increment = int.from_bytes(payload, "big") & 0x7FFFFFFF
            if stream:
                self._stream_window += increment
            else:
                self._window += increment
        elif kind == frames.PING:
            frames.check_size(payload, 8, stream == 0)
            if not flags & frames.ACK:  # none is sent, so none is acknowledged
                self._answers += frames.frame(frames.PING, frames.ACK, 0, payload)
        elif kind == frames.SETTINGS:
            self._take_settings(stream, flags, payload)
        elif kind == frames.RST_STREAM:
            frames.check_size(payload, 4, stream == _STREAM)
            reason = int.from_bytes(payload, "big")
            code = _OF_RESET.get(reason, grpc.StatusCode.UNAVAILABLE)
            self._finish(code, f"the stream was reset ({reason})")
        elif kind == frames.GOAWAY:
            last, reason = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
            if reason != ErrorCodes.NO_ERROR or last < _STREAM:
                self._finish(grpc.StatusCode.UNAVAILABLE, f"the service closes the connection ({reason})")
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a push that was not to be")

    def _take_settings(self, stream: int, flags: int, payload: bytes) -> None:
        before = self._settings.stream_window
        if self._settings.take(stream, flags, payload):
            self._answers += frames.frame(frames.SETTINGS, frames.ACK, 0)
            self._answered = True
            self._tell_waiters()
        self._stream_window += self._settings.stream_window - before

    def _take_whole(self, data: bytes) -> bool:
        """Takes exactly one message in one frame, the usual case, in half the time; returns False for anything else."""
        size = len(data) - frames.HEADER
        if not self._answered or not PREFIX <= size <= self._most_whole or self._consumed + size > _WINDOW // 2:
            return False
        if not data.startswith(_whole_head(size)):
            return False
        self._consumed += size
        self._on_message(data[14:])
        if self._messages:
            self._tell_waiters()
        return True

    def _flush(self) -> None:
        """Sends more of what had to wait, and says if that is all."""
        blocked = bool(self._unsent)
        self._send()
        if blocked:
            self._tell_ready()

    def _send(self) -> None:
        """Sends what the windows and the socket allow."""
        assert self._transport is not None
        parts = [self._answers]  # settings are acknowledged before use is made of them
        self._answers = b""
        while self._unsent and not self._paused:
            size = min(len(self._unsent), self._window, self._stream_window, self._settings.frame_size)
            if size <= 0:
                break
            parts += (size.to_bytes(3, "big"), _DATA, bytes(memoryview(self._unsent)[:size]))
            del self._unsent[:size]
            self._window -= size
            self._stream_window -= size
        if self._consumed > _WINDOW // 2:
            parts += (frames.window_update(stream, self._consumed) for stream in (0, _STREAM))
            self._consumed = 0
        if data := b"".join(parts):
            self._transport.write(data)

    def _tell_ready(self) -> None:
        if self._on_ready is not None and self.ready:
            self._on_ready()

    def _finish(self, code: grpc.StatusCode, details: str) -> None:
        if self._end is not None:
            return
        self._end = CallEndedError(code, details)
        self._on_ready = None
        self._unsent.clear()
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._transport.abort()  # a peer that reads nothing would keep the connection for ever
        elif self._transport is not None:
            self._transport.close()
        self._tell_waiters()

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _tell_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


@lru_cache(maxsize=1024)
def _whole_head(size: int) -> bytes:
    """The bytes before a message that fills a frame of ``size`` bytes: the frame's header, then the message's."""
    return size.to_bytes(3, "big") + _DATA + (size - PREFIX).to_bytes(PREFIX, "big")


def _check_known(known: bool) -> None:
    if not known:
        raise ConnectionFailedError(
            ErrorCodes.PROTOCOL_ERROR, "a frame for a stream that there is not, or before settings"
        )
