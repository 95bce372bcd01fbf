"""One bidirectional gRPC call on an HTTP/2 connection of its own, carried by the event loop that uses it.

grpcio's asyncio API reads and writes on a thread of its own and wakes the event loop for each message, which costs about 160 us
of CPU time a message. Here the loop does it itself: ``h2`` keeps the connection (greeting, settings, headers, resets), for
about 65 us a frame; DATA frames, which carry the messages, are packed, unpacked and counted against the windows here, for about
5, and pings are answered here. That is for a call with a message a step for as long as its service lives. Others are grpcio's.

A graceful GOAWAY changes nothing: the call goes on to its end, and there will be no other on its connection. h2 knows no
connection that is about to end, so it does not get to see these.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import WindowUpdateFrame

_STREAM = 1
"""The only one of its connection."""
_WINDOW = 16 * 1024 * 1024
"""Bytes that may be under way to us."""
_HEADER = 9
_DATA, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 6, 7, 8
_END_STREAM, _ACK, _PADDED = 1, 1, 8
_PONG = b"\0\0\x08\x06\x01\0\0\0\0"
"""Header of the answer to a PING, which grpcio sends to measure with nearly every message."""
_PREFIX = b"\0\0" + _STREAM.to_bytes(4, "big")
"""Of a DATA frame, after its length: type, flags, stream."""
_USUAL_WINDOW = 65535
_LARGEST_FRAME = 16384
"""That a peer may send, as it was told no other."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_OF_RESET = {
    ErrorCodes.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCodes.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCodes.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class CallEndedError(Exception):
    """The call is over.

    Attributes:
        code: Its status; OK too is an end.
    """

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__("the service ended it" if code is grpc.StatusCode.OK else f"{code.name}: {details}")
        self.code = code


class DuplexCall(asyncio.Protocol):
    """The protocol of the call's connection.

    Life cycle: :func:`~sapwood_router.duplex_dial.open_call`; :meth:`read` for some messages; :meth:`follow`; :meth:`close`.

    Args:
        authority: ``host:port``, for the headers.
        method: The method's path, ``/package.Service/Method``.
        secure: Whether the connection is TLS.
        most_bytes: The largest message taken.
    """

    def __init__(self, authority: str, method: str, *, secure: bool, most_bytes: int) -> None:
        self._headers = [
            (":method", "POST"),
            (":scheme", "https" if secure else "http"),
            (":path", method),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "sapwood"),
        ]
        self._most_bytes = most_bytes
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._transport: asyncio.Transport | None = None
        self._unsent = bytearray()
        self._pongs = b""
        self._window = self._stream_window = _USUAL_WINDOW
        """Bytes that the peer takes on the connection, and on the stream."""
        self._consumed = 0
        """Bytes that it sent and was not told yet to have been taken."""
        self._paused = False
        self._inbound = bytearray()
        self._unread = bytearray()
        self._messages: deque[bytes] = deque()
        self._on_message: Callable[[bytes], None] = self._messages.append
        self._on_ready: Callable[[], None] | None = None
        self._answered = False
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._end: CallEndedError | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def ended(self) -> bool:
        """Whether nothing is sent or received any more."""
        return self._end is not None

    @property
    def ready(self) -> bool:
        """Whether all that was written has gone to the socket; else what else there is had better go in one message later."""
        return not self._unsent and not self._paused and self._end is None

    def write(self, message: bytes) -> None:
        """Sends a message, as soon as the connection takes it. After the end does nothing."""
        if self._end is None:
            self._unsent += b"\0" + len(message).to_bytes(4, "big") + message
            self._flush()

    async def read(self) -> bytes:
        """The next message.

        Raises:
            CallEndedError: There is none.
        """
        while not self._messages:
            if self._end is not None:
                raise self._end
            await self._change()
        return self._messages.popleft()

    def follow(self, on_message: Callable[[bytes], None], on_ready: Callable[[], None]) -> None:
        """Hands over all messages not read yet, and from now on each as it comes.

        Args:
            on_message: Must not raise; one that does ends the call.
            on_ready: Called when :attr:`ready` turns true again.
        """
        self._on_ready = on_ready
        self._on_message = on_message
        while self._messages:
            on_message(self._messages.popleft())

    async def answered(self) -> None:
        """Returns once the peer has greeted.

        Raises:
            CallEndedError: It did not.
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
            self._h2.reset_stream(_STREAM, ErrorCodes.CANCEL)
            self._transport.write(self._h2.data_to_send())
        self._finish(grpc.StatusCode.CANCELLED, reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol: begins the call."""
        self._transport = cast(asyncio.Transport, transport)
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW)
        self._h2.send_headers(_STREAM, self._headers)
        self._transport.write(self._h2.data_to_send())

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._finish(
            grpc.StatusCode.UNAVAILABLE, f"the connection broke: {exc}" if exc else "the connection was closed"
        )

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._end is not None:
            return
        self._inbound += data
        try:
            self._take_frames()
        except ProtocolError as error:
            self._finish(grpc.StatusCode.INTERNAL, f"not HTTP/2 as it should be: {error}")
        if self._end is None:
            self._take_messages()
            self._flush()

    def eof_received(self) -> bool:
        """See asyncio.Protocol: the connection closes."""
        return False

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._paused = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._paused = False
        if self._end is None:
            self._flush()
            self._tell_ready()

    def _take_frames(self) -> None:
        """Takes what has come, up to the last whole frame."""
        inbound, begin, at = self._inbound, 0, 0
        while len(inbound) - at >= _HEADER:
            size = _HEADER + int.from_bytes(inbound[at : at + 3], "big")
            if size > _HEADER + _LARGEST_FRAME:
                raise ProtocolError("a frame of more bytes than allowed")
            if len(inbound) - at < size:
                break
            kind = inbound[at + 3]
            if kind in (_DATA, _PING, _GOAWAY, _WINDOW_UPDATE):
                self._take_others(begin, at)
                begin = at + size
                if kind == _DATA:
                    self._take_data(inbound[at + 4], inbound[at + _HEADER : begin])
                elif kind == _PING:
                    self._take_ping(inbound[at + 4], inbound[at + _HEADER : begin])
                elif kind == _GOAWAY:
                    self._take_goaway(inbound[at + _HEADER : begin])
                elif int.from_bytes(inbound[at + 5 : at + _HEADER], "big") == 0:
                    self._window += int.from_bytes(inbound[at + _HEADER : begin], "big")
                else:
                    self._stream_window += int.from_bytes(inbound[at + _HEADER : begin], "big")
            at += size
        self._take_others(begin, at)
        del inbound[:at]

    def _take_others(self, begin: int, end: int) -> None:
        """Hands frames that carry no messages to h2."""
        if begin < end and self._end is None:
            self._take_messages()  # what came before them counts before what they say
            for event in self._h2.receive_data(bytes(self._inbound[begin:end])):
                self._take(event)

    def _take_data(self, flags: int, payload: bytearray) -> None:
        if flags & _END_STREAM:
            raise ProtocolError("an end without a status")
        self._consumed += len(payload)
        self._unread += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload

    def _take_ping(self, flags: int, payload: bytearray) -> None:
        if len(payload) != 8:
            raise ProtocolError("a ping of another size")
        if not flags & _ACK:  # none is sent, so none is acknowledged
            self._pongs += _PONG + payload

    def _take_goaway(self, payload: bytearray) -> None:
        last, code = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
        if code != ErrorCodes.NO_ERROR or last < _STREAM:
            self._finish(grpc.StatusCode.UNAVAILABLE, f"the service closes the connection ({code})")

    def _flush(self) -> None:
        """Sends what the windows and the socket allow."""
        assert self._transport is not None
        blocked = bool(self._unsent)
        frames = [self._h2.data_to_send(), self._pongs]  # settings are acknowledged before use is made of them
        self._pongs = b""
        while self._unsent and not self._paused:
            size = min(len(self._unsent), self._window, self._stream_window, self._h2.max_outbound_frame_size)
            if size <= 0:
                break
            frames += (size.to_bytes(3, "big"), _PREFIX, bytes(self._unsent[:size]))
            del self._unsent[:size]
            self._window -= size
            self._stream_window -= size
        if self._consumed > _WINDOW // 2:
            frames += (WindowUpdateFrame(stream, self._consumed).serialize() for stream in (0, _STREAM))
            self._consumed = 0
        if data := b"".join(frames):
            self._transport.write(data)
        if blocked:
            self._tell_ready()

    def _tell_ready(self) -> None:
        if self._on_ready is not None and self.ready:
            self._on_ready()

    def _take(self, event: Event) -> None:
        if isinstance(event, ResponseReceived | TrailersReceived):
            self._take_headers(cast("list[tuple[str, str]]", event.headers))
        elif isinstance(event, StreamEnded):
            self._finish(*(self._status or (grpc.StatusCode.INTERNAL, "it ended without a status")))
        elif isinstance(event, StreamReset):
            code = _OF_RESET.get(cast(ErrorCodes, event.error_code), grpc.StatusCode.UNAVAILABLE)
            self._finish(code, f"the stream was reset ({event.error_code})")
        elif isinstance(event, RemoteSettingsChanged):
            window = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
            if window is not None:
                self._stream_window += window.new_value - (window.original_value or 0)
            self._answered = True
            self._tell_waiters()

    def _take_messages(self) -> None:
        unread, at = self._unread, 0
        while len(unread) - at >= 5 and self._end is None:
            size = int.from_bytes(unread[at + 1 : at + 5], "big")
            if unread[at] or size > self._most_bytes:
                self._finish(grpc.StatusCode.INTERNAL, "a message is compressed, or too large")
                return
            if len(unread) - at - 5 < size:
                break
            self._on_message(bytes(unread[at + 5 : at + 5 + size]))
            at += 5 + size
        del unread[:at]
        if self._messages:
            self._tell_waiters()

    def _take_headers(self, headers: list[tuple[str, str]]) -> None:
        found = dict(headers)
        if "grpc-status" in found:
            number = found["grpc-status"]
            code = _CODES.get(int(number) if number.isdecimal() else -1, grpc.StatusCode.UNKNOWN)
            self._status = (code, unquote(found.get("grpc-message", "")))
        elif found.get(":status", "200") != "200":
            self._status = (grpc.StatusCode.UNAVAILABLE, f"HTTP status {found[':status']}")

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
