"""Acts on each frame that a client sends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from h2.errors import ErrorCodes
from hpack import HPACKError

from sapwood_net.http2.server.flow_control import FlowControl
from sapwood_net.http2.server.limits import frame_rates
from sapwood_net.http2.server.limits.frame_rates import FrameRates
from sapwood_net.http2.server.stream import CRUMB, WINDOW, ServerStream
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import ConnectionFailedError
from sapwood_net.http2.wire.header_reader import HeaderReader
from sapwood_net.http2.wire.request_head import RequestHead, find_trailer_problem
from sapwood_net.http2.wire.stream_ids import StreamIds

logger = logging.getLogger(__name__)

_SETTINGS_BYTES = 96
"""Bytes of a SETTINGS frame for which it counts as one more: 16 settings, where there are 7 kinds."""
_BYTES_A_FRAME = 2
"""Bytes of DATA sent that earn the client one WINDOW_UPDATE and one PING."""


class FrameConnection(Protocol):
    """A connection, as its frames know it.

    Attributes:
        peer: The client's address.
        answers: Header blocks that were sent.
    """

    peer: str
    answers: int

    @property
    def takes_more(self) -> bool:
        """Whether the client may open one more stream."""
        ...

    def send(self, data: bytes) -> None:
        """Writes whole frames."""
        ...

    def open_stream(self, number: int, head: RequestHead, ends: bool) -> None:
        """Begins a well-formed call; ``ends`` if it has no content. Raises ConnectionFailedError if there are too many."""
        ...

    def take_pong(self, payload: bytes) -> None:
        """Takes the client's answer to a PING."""
        ...


class IncomingFrames:
    """Takes the frames of one connection. Implements ``FrameReceiver``.

    Args:
        connection: The connection.
        streams: Its open streams, by number. Not copied.
        flow: Its windows.
        ids: Remembers which streams there were.
        rates: Limits frames that are of no use.

    Attributes:
        consumed: Bytes of DATA since the last WINDOW_UPDATE to the client.
    """

    def __init__(
        self,
        connection: FrameConnection,
        streams: Mapping[int, ServerStream],
        flow: FlowControl,
        ids: StreamIds,
        rates: FrameRates,
    ) -> None:
        self.consumed = 0
        self._connection = connection
        self._streams = streams
        self._flow = flow
        self._ids = ids
        self._rates = rates
        self._headers = HeaderReader(RequestHead)
        self._opened = 0
        """Streams that the client has opened."""
        self._late = 0
        """Bytes of DATA of streams that were over. When a stream ends, at most a window of it is on its way."""

    def take_data(self, stream: int, payload: bytes, wire_bytes: int, ends: bool) -> None:
        self.consumed += wire_bytes
        found = self._streams.get(stream)
        if found is not None:
            worth = found.take_data(payload, wire_bytes)
            if ends:
                found.take_end()
            elif not worth:
                self._rates.take(frame_rates.CRUMB, self._ids.last)
        elif self._ids.is_idle(stream):
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, f"data on stream {stream}, which is not open")
        else:
            self._fail_stream(stream, ErrorCodes.STREAM_CLOSED, "data on a stream that is over")
            self._late += wire_bytes
            if self._late > WINDOW * self._opened:
                text = "more data of streams that are over than can have been on their way"
                raise ConnectionFailedError(ErrorCodes.ENHANCE_YOUR_CALM, text)
            if len(payload) < CRUMB:
                self._rates.take(frame_rates.CRUMB, self._ids.last)

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
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
        self._opened += 1
        if not self._connection.takes_more:
            self._refuse(stream, ErrorCodes.REFUSED_STREAM, ends)
        elif head is None:
            self._refuse(stream, ErrorCodes.ENHANCE_YOUR_CALM, ends)
        elif head.problem is not None or (ends and head.content_length):
            reason = head.problem or "content-length without content"
            logger.debug("%s: a malformed request: %s", self._connection.peer, reason)
            self._refuse(stream, ErrorCodes.PROTOCOL_ERROR, ends)
        else:
            self._connection.open_stream(stream, head, ends)

    def _take_trailers(self, stream: ServerStream, block: bytes, ends: bool) -> None:
        """Takes trailers, which gRPC's clients do not send: they are checked and end the stream."""
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
        """Takes header fields of a stream that is over: trailers that were on their way when it ended here, or a mistake."""
        if self._ids.is_skipped(stream):
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, f"stream {stream} opened after a later one")
        if not self._ids.may_be_late(stream):
            raise ConnectionFailedError(ErrorCodes.STREAM_CLOSED, f"headers on stream {stream}, which is over")

    def _refuse(self, stream: int, code: ErrorCodes, ended: bool) -> None:
        """Ends a stream that has not begun."""
        self._connection.send(frames.reset(stream, code))
        if not ended:
            self._ids.cut_off(stream)
        self._rates.take(frame_rates.FAULT)

    def _fail_stream(self, stream: int, code: ErrorCodes, message: str) -> None:
        """Ends a stream that had a frame against the protocol; ends the connection if there has never been such a stream."""
        found = self._streams.get(stream)
        if found is not None:
            found.break_off(code)
        elif self._ids.is_idle(stream):
            raise ConnectionFailedError(code, message)
        elif not self._ids.may_be_late(stream):
            self._refuse(stream, code, ended=False)

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            frames.check_size(payload, 4, not stream or not self._ids.is_idle(stream))
            self._rates.take(frame_rates.WINDOW_UPDATE, self._ids.last + self._flow.sent // _BYTES_A_FRAME)
            self._flow.take_window(stream, payload)
        elif kind == frames.PING and not flags & frames.ACK:
            frames.check_size(payload, 8, stream == 0)
            self._rates.take(frame_rates.PING, self._ids.last + self._flow.sent // _BYTES_A_FRAME)
            self._connection.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM and stream in self._streams:
            frames.check_size(payload, 4, True)
            self._streams[stream].take_gone()
            self._rates.take(frame_rates.RESET, self._connection.answers)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._rates.take(frame_rates.SETTINGS, 0, 1 + len(payload) // _SETTINGS_BYTES)
            if self._flow.take_settings(stream, flags, payload):
                self._connection.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
                self._flow.unblock()
        else:
            self._rates.take(frame_rates.OTHER, self._ids.last, 1 + len(payload) // 1024)
            self._take_useless(kind, stream, flags, payload)

    def _take_useless(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        """Checks a frame that changes nothing."""
        if kind == frames.PING:
            frames.check_size(payload, 8, stream == 0)
            self._connection.take_pong(payload)
        elif kind == frames.RST_STREAM:
            frames.check_size(payload, 4, not self._ids.is_idle(stream))
        elif kind == frames.SETTINGS:
            self._flow.take_settings(stream, flags, payload)
        elif kind == frames.PRIORITY:
            self._take_priority(stream, payload)
        elif kind == frames.GOAWAY:  # it asks for nothing: the client opens no more streams
            frames.check_size(payload[:8], 8, stream == 0)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a client promised a push")
        # Frames of unknown types are ignored.

    def _take_priority(self, stream: int, payload: bytes) -> None:
        """Checks a priority. RFC 9113 has made them obsolete: a well-formed one changes nothing."""
        if not stream:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a priority of the connection")
        if len(payload) != frames.PRIORITY_SIZE:
            self._fail_stream(stream, ErrorCodes.FRAME_SIZE_ERROR, "a priority of another size")
        elif frames.depends_on(payload) == stream:
            self._fail_stream(stream, ErrorCodes.PROTOCOL_ERROR, "a stream that depends on itself")
