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
from sapwood_common.http2.header_reader import MOST_HEADER_BYTES, HeaderReader
from sapwood_common.http2.lifetime import Due, Lifetime, Timeouts
from sapwood_common.http2.request_head import RequestHead, find_trailer_problem
from sapwood_common.http2.stream import WINDOW, ServerStream
from sapwood_common.http2.stream_ids import StreamIds
from sapwood_common.time_share import TimeShare

logger = logging.getLogger(__name__)

_CONNECTION_WINDOW = 16 * 1024 * 1024
_MOST_STREAMS = 16384
"""Calls at a time. Each holds some 2 KB before its first message, for a few bytes that the client sends."""
_PING, _LAST_PING = b"sapwood.", b"goodbye."
"""What pings say: whether the client is there, and whether it has heard that it is to go."""
_CLOSE_SECONDS = 1.0
_MOST_UNREAD = 4 * 1024 * 1024
"""Bytes that wait for a client that goes on sending. Messages stop long before; answers to its pings and the like do not."""


Opener = Callable[["ServerConnection", ServerStream, RequestHead], None]
"""Answers the call that a stream's header fields begin: names its receiver, and must not raise."""


class ServerConnection(asyncio.Protocol):
    """One client's connection.

    Args:
        opener: Answers calls.
        on_made: Called when it has begun, which after a failed TLS handshake it never does.
        on_lost: Called when it is over.
        most_bytes: The largest message taken.
        share: Shares the event loop's time among connections.
        timeouts: How long what may last.
    """

    def __init__(
        self,
        opener: Opener,
        on_made: Callable[[ServerConnection], None],
        on_lost: Callable[[ServerConnection], None],
        most_bytes: int,
        share: TimeShare,
        timeouts: Timeouts,
    ) -> None:
        self.peer = ""
        """The client's address as grpcio writes it."""
        self._opener = opener
        self._on_made = on_made
        self._on_lost = on_lost
        self._most_bytes = most_bytes
        self._share = share
        self._transport: asyncio.Transport | None = None
        self._greeting = b""
        """What has come of the client's preface, until it is whole."""
        self._greeted = False
        self._reader = FrameReader()
        self._behind = False
        """Whether it has read more than it had time for."""
        self._headers = HeaderReader(RequestHead)
        self._has_table = True
        """Whether the client still expects header fields to enter its table."""
        self._streams: dict[int, ServerStream] = {}
        self._flow = FlowControl(self._streams, lambda: share.add(self))
        self._ids = StreamIds()
        self._consumed = 0
        self._closing = False
        self._aborter: asyncio.TimerHandle | None = None
        self._life = Lifetime(timeouts)

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
        if stream.remote_open:
            self._ids.cut_off(stream.number)
        if self._closing and not self._streams and self._transport is not None:
            self._transport.close()

    def check(self, now: float) -> None:
        """To be called every few seconds, with the event loop's time: pings, retires or gives up who has been silent or idle."""
        if self._transport is None:
            return
        due = self._life.check(
            now,
            greeted=self._greeted,
            busy=bool(self._streams),
            last_stream=self._ids.last,
            closing=self._transport.is_closing(),
        )
        if due is Due.PING:
            self.send(frames.frame(frames.PING, 0, 0, _PING))
        elif due is Due.RETIRE:
            # Calls that are on their way are answered yet: which is the last is said once the client has heard this.
            self._goaway(ErrorCodes.NO_ERROR, frames.LAST_STREAM)
            self.send(frames.frame(frames.PING, 0, 0, _LAST_PING))
        elif due is Due.GIVE_UP:
            logger.info("%s does not answer: its connection is given up", self.peer)
            self._transport.abort()

    def close_gently(self) -> None:
        """Takes no more calls; closes once those that run have ended."""
        if self._closing or self._transport is None:
            return
        self._closing = True
        if self._greeted:
            self._goaway(ErrorCodes.NO_ERROR, self._ids.last)
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
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            logger.info("%s does not offer h2 in its TLS handshake (ALPN)", self.peer)
            self._transport.close()
            return
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
        self._share.drop(self)
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
        self._life.heard = True
        self._take(data, self._share.is_over)
        if self._share.measuring:
            self._share.end()
        if self._behind and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._share.add(self)

    def go_on(self, until: float) -> bool:
        """See Worker."""
        assert self._transport is not None
        if self._transport.is_closing():
            return False
        if self._behind:
            self._life.heard = True
            self._take(b"", lambda: self._share.clock() >= until)
            if self._transport.is_closing():
                return False
            if not self._behind:
                self._transport.resume_reading()
        return (self.writable and self._flow.write_on()) or self._behind

    def _take(self, data: bytes, is_over: Callable[[], bool]) -> None:
        """Takes frames as long as there is time, and keeps the rest."""
        try:
            if not self._greeted:
                data = self._take_greeting(data)
            self._behind = self._reader.feed(data, self, is_over)
        except ConnectionFailedError as error:
            logger.info("%s: %s", self.peer, error)
            self._goaway(error.code, self._ids.last)
            self.close()
            return
        if self._consumed > _CONNECTION_WINDOW // 2:
            self.send(frames.window_update(0, self._consumed))
            self._consumed = 0
        assert self._transport is not None
        if self._flow.paused and self._transport.get_write_buffer_size() > _MOST_UNREAD:
            logger.info("%s reads no answers: its connection is given up", self.peer)
            self._transport.abort()

    def _take_greeting(self, data: bytes) -> bytes:
        """Waits for the preface and the head of the first frame; returns what there is of frames by then."""
        assert self._transport is not None
        if self._transport.is_closing():  # it was refused
            return b""
        greeting = self._greeting = self._greeting + data
        if not greeting.startswith(frames.PREFACE[: len(greeting)]):
            self._refuse_protocol(greeting)
            return b""
        start = len(frames.PREFACE)
        if len(greeting) < start + frames.HEADER:
            return b""
        self._greeting = b""
        self._greeted = True
        if greeting[start + 3] != frames.SETTINGS or greeting[start + 4] & frames.ACK:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        return greeting[start:]

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
        elif self._ids.is_idle(stream):
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, f"data on stream {stream}, which is not open")
        else:
            self._fail_stream(stream, ErrorCodes.STREAM_CLOSED, "data on a stream that is over")

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
        """See FrameReceiver."""
        if not stream % 2:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, f"a client opened stream {stream}")
        found = self._streams.get(stream)
        try:
            if found is not None:
                self._take_trailers(found, block, ends)
                return
            head = self._headers.read(block)
        except HPACKError as error:
            raise ConnectionFailedError(ErrorCodes.COMPRESSION_ERROR, f"headers: {error}") from error
        if stream <= self._ids.last:
            self._take_late_block(stream)
            return
        self._ids.open(stream)
        if self._closing or len(self._streams) >= _MOST_STREAMS:
            self._refuse(stream, ErrorCodes.REFUSED_STREAM, ends)
        elif head is None:
            self._refuse(stream, ErrorCodes.ENHANCE_YOUR_CALM, ends)
        elif head.problem is not None or (ends and head.content_length):
            logger.debug("%s: a malformed request: %s", self.peer, head.problem or "content-length without content")
            self._refuse(stream, ErrorCodes.PROTOCOL_ERROR, ends)
        else:
            found = self._streams[stream] = ServerStream(self, self._flow, stream, self._most_bytes)
            if head.content_length is not None:
                found.expect(head.content_length)
            self._opener(self, found, head)
            if ends and not found.closed:
                found.take_end()

    def _take_trailers(self, stream: ServerStream, block: bytes, ends: bool) -> None:
        """gRPC's clients send none: they are checked, and say no more than that the stream ends."""
        headers = self._headers.read_trailers(block)
        if not stream.remote_open:
            stream.break_off(ErrorCodes.STREAM_CLOSED)
        elif headers is None:
            stream.break_off(ErrorCodes.ENHANCE_YOUR_CALM)
        elif not ends or find_trailer_problem(headers) is not None:
            stream.break_off(ErrorCodes.PROTOCOL_ERROR)
        else:
            stream.take_end()

    def _take_late_block(self, stream: int) -> None:
        """Header fields of a stream that is over: trailers that were on their way when it ended here, or a mistake."""
        if self._ids.is_skipped(stream):
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, f"stream {stream} opened after a later one")
        if not self._ids.may_be_late(stream):
            raise ConnectionFailedError(ErrorCodes.STREAM_CLOSED, f"headers on stream {stream}, which is over")

    def _refuse(self, stream: int, code: ErrorCodes, ended: bool) -> None:
        """Ends a stream that has not begun."""
        self.send(frames.reset(stream, code))
        if not ended:
            self._ids.cut_off(stream)

    def _fail_stream(self, stream: int, code: ErrorCodes, message: str) -> None:
        """A frame breaks the protocol of one stream: that ends, or the connection if there has never been one."""
        found = self._streams.get(stream)
        if found is not None:
            found.break_off(code)
        elif self._ids.is_idle(stream):
            raise ConnectionFailedError(code, message)
        elif not self._ids.may_be_late(stream):
            self._refuse(stream, code, ended=False)

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        """See FrameReceiver."""
        if kind == frames.WINDOW_UPDATE:
            frames.check_size(payload, 4, not stream or not self._ids.is_idle(stream))
            self._flow.take_window(stream, payload)
        elif kind == frames.PING:
            frames.check_size(payload, 8, stream == 0)
            if not flags & frames.ACK:
                self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
            elif payload == _LAST_PING and self._life.retired:
                self.close_gently()
        elif kind == frames.RST_STREAM:
            frames.check_size(payload, 4, not self._ids.is_idle(stream))
            if stream in self._streams:
                self._streams[stream].take_gone()
        elif kind == frames.SETTINGS:
            if self._flow.take_settings(stream, flags, payload):
                self.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
                self._flow.unblock()
        elif kind == frames.PRIORITY:
            self._take_priority(stream, payload)
        elif kind == frames.GOAWAY:  # it asks for nothing: the client opens no more streams
            frames.check_size(payload[:8], 8, stream == 0)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a client promised a push")
        # Others are to be ignored.

    def _take_priority(self, stream: int, payload: bytes) -> None:
        """Priorities are obsolete: one that is well formed changes nothing."""
        if not stream:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a priority of the connection")
        if len(payload) != frames.PRIORITY_SIZE:
            self._fail_stream(stream, ErrorCodes.FRAME_SIZE_ERROR, "a priority of another size")
        elif frames.depends_on(payload) == stream:
            self._fail_stream(stream, ErrorCodes.PROTOCOL_ERROR, "a stream that depends on itself")

    def _goaway(self, code: ErrorCodes, last: int) -> None:
        self.send(frames.frame(frames.GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big")))
