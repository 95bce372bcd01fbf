"""The server's end of an HTTP/2 connection (RFC 9113) that carries gRPC and nothing else, on the event loop.

grpcio's asyncio server reads and writes on a thread of its own and wakes the event loop for each message, which costs about
120 us of CPU time a message; ``h2`` costs about 65 us a frame. Here a message of 200 bytes that leaves costs about 1.5 us beside
the socket's own cost, and one that comes and is read about 4: frames are packed and unpacked in place (:class:`FrameReader`),
and ``hpack`` reads the headers, once for blocks that come again and again (:class:`HeaderReader`). Header fields that are sent
enter no table, so that they cost no look-up and no memory.

Each frame costs time linear in its length. Held for a client are at most ``_MOST_STREAMS`` streams, ``WINDOW`` bytes and one
message a stream, and ``_MOST_UNREAD`` bytes of answers to its frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import HPACKError

from sapwood_common.http2 import frames
from sapwood_common.http2.flow_control import FlowControl
from sapwood_common.http2.frame_reader import FrameReader
from sapwood_common.http2.frames import ConnectionFailedError
from sapwood_common.http2.header_reader import MOST_HEADER_BYTES, HeaderReader, Headers
from sapwood_common.http2.stream import WINDOW, ServerStream

logger = logging.getLogger(__name__)

_CONNECTION_WINDOW = 16 * 1024 * 1024
_MOST_STREAMS = 16384
"""Calls at a time. Each holds some 2 KB before its first message, for a few bytes that the client sends."""
_PING = b"sapwood."
_CLOSE_SECONDS = 1.0
_MOST_UNREAD = 4 * 1024 * 1024
"""Bytes that wait for a client that goes on sending. Messages stop long before; answers to its pings and the like do not."""


Opener = Callable[["ServerConnection", ServerStream, Headers], None]
"""Answers the call that a stream's headers begin: names its receiver, and must not raise."""


class ServerConnection(asyncio.Protocol):
    """One client's connection.

    Args:
        opener: Answers calls.
        on_made: Called when it has begun, which after a failed TLS handshake it never does.
        on_lost: Called when it is over.
        most_bytes: The largest message taken.
    """

    def __init__(
        self,
        opener: Opener,
        on_made: Callable[[ServerConnection], None],
        on_lost: Callable[[ServerConnection], None],
        most_bytes: int,
    ) -> None:
        self.peer = ""
        """The client's address as grpcio writes it."""
        self._opener = opener
        self._on_made = on_made
        self._on_lost = on_lost
        self._most_bytes = most_bytes
        self._transport: asyncio.Transport | None = None
        self._greeting = b""
        """What has come of the client's preface, until it is whole."""
        self._greeted = False
        self._reader = FrameReader()
        self._headers = HeaderReader()
        self._has_table = True
        """Whether the client still expects header fields to enter its table."""
        self._streams: dict[int, ServerStream] = {}
        self._flow = FlowControl(self._streams)
        self._last = 0
        self._consumed = 0
        self._closing = False
        self._aborter: asyncio.TimerHandle | None = None
        self._heard = True

    @property
    def writable(self) -> bool:
        """See StreamConnection."""
        # A socket that has failed takes everything and says nothing until the event loop's next turn, which whoever finds it
        # writable for ever does not give it.
        return not self._flow.paused and self._transport is not None and not self._transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self._streams

    def send(self, data: bytes) -> None:
        """See StreamConnection."""
        assert self._transport is not None
        self._transport.write(data)

    def send_headers(self, stream: int, block: bytes, *, end: bool = False) -> None:
        """See StreamConnection."""
        if self._has_table:
            self._has_table = False
            block = frames.NO_TABLE + block
        self.send(frames.header_frames(stream, block, self._flow.frame_size, end=end))

    def forget(self, stream: ServerStream) -> None:
        """See StreamConnection."""
        self._streams.pop(stream.number, None)
        self._flow.forget(stream)
        if self._closing and not self._streams and self._transport is not None:
            self._transport.close()

    def check_alive(self) -> None:
        """To be called now and then: gives up a client that has calls and said nothing since it was pinged the last time.

        Also one that has not even said that it speaks HTTP/2.
        """
        if self._transport is None or self._transport.is_closing():
            return
        if not self._heard and (self._streams or not self._greeted):
            logger.info("%s does not answer: its connection is given up", self.peer)
            self._transport.abort()
            return
        self._heard = False
        if self._streams:
            self.send(frames.frame(frames.PING, 0, 0, _PING))

    def close_gently(self) -> None:
        """Takes no more calls; closes once those that run have ended."""
        if self._closing or self._transport is None:
            return
        self._closing = True
        if self._greeted:
            self._goaway(ErrorCodes.NO_ERROR)
        if not self._streams:
            self._transport.close()

    def close(self) -> None:
        """Closes, after what was written; calls that run find their client gone."""
        self._closing = True
        for stream in tuple(self._streams.values()):
            stream.take_gone()
        if self._transport is not None:
            self._transport.close()
            # A client that reads nothing would keep the connection for ever.
            if self._aborter is None:
                self._aborter = asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol: greets."""
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
        self.send(
            frames.settings(
                (
                    (SettingCodes.MAX_CONCURRENT_STREAMS, _MOST_STREAMS),
                    (SettingCodes.INITIAL_WINDOW_SIZE, WINDOW),
                    (SettingCodes.MAX_HEADER_LIST_SIZE, MOST_HEADER_BYTES),
                )
            )
            + frames.window_update(0, _CONNECTION_WINDOW - frames.USUAL_WINDOW)
        )
        self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._closing = True
        if self._aborter is not None:
            self._aborter.cancel()
        for stream in tuple(self._streams.values()):
            stream.take_gone()
        self._on_lost(self)

    def eof_received(self) -> bool:
        """See asyncio.Protocol: the connection closes, whether or not the client still reads."""
        self.close()
        return False

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._flow.paused = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._flow.paused = False
        self._flow.unblock()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._heard = True
        if not self._greeted:
            data = self._greeting = self._greeting + data
            if not data.startswith(frames.PREFACE[: len(data)]):
                self._refuse_protocol(data)
                return
            if len(data) < len(frames.PREFACE):
                return
            data, self._greeting = data[len(frames.PREFACE) :], b""
            self._greeted = True
        try:
            self._reader.feed(data, self)
        except ConnectionFailedError as error:
            logger.info("%s: %s", self.peer, error)
            self._goaway(error.code)
            self.close()
            return
        if self._consumed > _CONNECTION_WINDOW // 2:
            self.send(frames.window_update(0, self._consumed))
            self._consumed = 0
        assert self._transport is not None
        if self._flow.paused and self._transport.get_write_buffer_size() > _MOST_UNREAD:
            logger.info("%s reads no answers: its connection is given up", self.peer)
            self._transport.abort()

    def _refuse_protocol(self, inbound: bytes) -> None:
        """Tells whoever speaks HTTP/1.1 what this port is."""
        assert self._transport is not None
        if b"HTTP/1." in inbound:
            text = b"this port speaks gRPC over HTTP/2\n"
            self.send(
                b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text)
            )
        self._transport.close()

    def take_data(self, stream: int, payload: bytes, wire_bytes: int, ends: bool) -> None:
        """See FrameReceiver."""
        self._consumed += wire_bytes
        found = self._streams.get(stream)
        if found is not None:
            found.take_data(payload, wire_bytes)
            if ends:
                found.take_end()
        elif stream > self._last or not stream:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, f"data on stream {stream}, which is not open")
        # Else it has ended here while this was on its way.

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
        """See FrameReceiver."""
        if not stream % 2:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, f"a client opened stream {stream}")
        try:
            headers = self._headers.read(block)
        except HPACKError as error:
            raise ConnectionFailedError(ErrorCodes.COMPRESSION_ERROR, f"headers: {error}") from error
        found = self._streams.get(stream)
        if found is not None:  # trailers, of which gRPC has none
            if ends:
                found.take_end()
            else:
                found.break_off(ErrorCodes.PROTOCOL_ERROR)
            return
        if stream <= self._last:  # trailers of a stream that has ended here, or ids that go down: it shall not wait
            self.send(frames.reset(stream, ErrorCodes.STREAM_CLOSED))
            return
        self._last = stream
        refused = self._closing or len(self._streams) >= _MOST_STREAMS
        if refused or headers is None:
            code = ErrorCodes.REFUSED_STREAM if refused else ErrorCodes.ENHANCE_YOUR_CALM
            self.send(frames.reset(stream, code))
            return
        found = self._streams[stream] = ServerStream(self, self._flow, stream, self._most_bytes)
        self._opener(self, found, headers)
        if ends and not found.closed:
            found.take_end()

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        """See FrameReceiver."""
        if kind == frames.WINDOW_UPDATE:
            frames.check_size(payload, 4, stream <= self._last)
            self._flow.take_window(stream, payload)
        elif kind == frames.PING:
            frames.check_size(payload, 8, stream == 0)
            if not flags & frames.ACK:
                self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM:
            frames.check_size(payload, 4, 0 < stream <= self._last)
            if stream in self._streams:
                self._streams[stream].take_gone()
        elif kind == frames.SETTINGS:
            change = self._flow.take_settings(stream, flags, payload)
            if change is not None:
                self.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
                self._flow.widen(change)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a client promised a push")
        # GOAWAY asks for nothing here: the client opens no more streams. PRIORITY is obsolete, and others are to be ignored.

    def _goaway(self, code: ErrorCodes) -> None:
        self.send(frames.frame(frames.GOAWAY, 0, 0, self._last.to_bytes(4, "big") + code.to_bytes(4, "big")))
