"""How much a client takes (RFC 9113, 5.2), and whose turn it is when there is room again.

Streams that wait for the same room write in turn: who had a turn and still waits goes to the end of the queue. Room on the
connection costs time linear in the streams that wait for it, changed settings time linear in those that are open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes

from sapwood_common.http2 import frames
from sapwood_common.http2.frames import ConnectionFailedError
from sapwood_common.http2.peer_settings import PeerSettings

if TYPE_CHECKING:
    from sapwood_common.http2.stream import ServerStream


class FlowControl:
    """The windows of one connection.

    Args:
        streams: Those that are open, by number; the connection's own.

    Attributes:
        window: Bytes of DATA that the client takes on the connection. Streams that write take from it.
        frame_size: The largest payload to send it.
        paused: Whether the socket takes no more.
    """

    __slots__ = ("_blocked", "_settings", "_streams", "frame_size", "paused", "window")

    def __init__(self, streams: Mapping[int, ServerStream]) -> None:
        self.window = frames.USUAL_WINDOW
        self.frame_size = frames.USUAL_FRAME
        self.paused = False
        self._settings = PeerSettings()
        self._streams = streams
        self._blocked: dict[ServerStream, None] = {}

    @property
    def stream_window(self) -> int:
        """Bytes that the client takes of a new stream."""
        return self._settings.stream_window

    def block(self, stream: ServerStream) -> None:
        """Has :meth:`ServerStream.flush` called once there is room on the connection and its socket."""
        self._blocked[stream] = None

    def forget(self, stream: ServerStream) -> None:
        """The stream is over."""
        self._blocked.pop(stream, None)

    def take_window(self, number: int, payload: bytes) -> None:
        """Takes a WINDOW_UPDATE frame, of the connection or of a stream that is open or over.

        Raises:
            ConnectionFailedError: The connection's window makes no sense; a stream's ends the stream.
        """
        increment = int.from_bytes(payload, "big") & 0x7FFFFFFF
        stream = self._streams.get(number)
        if number == 0:
            starved = self.window <= 0  # else nobody waits for it
            self.window += increment
            if not increment:
                raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a window grows by nothing")
            if self.window > frames.LARGEST_WINDOW:
                raise ConnectionFailedError(ErrorCodes.FLOW_CONTROL_ERROR, "a window too large")
            if starved:
                self.unblock()
        elif stream is not None:
            stream.window += increment
            if not increment:
                stream.break_off(ErrorCodes.PROTOCOL_ERROR)
            elif stream.window > frames.LARGEST_WINDOW:
                stream.break_off(ErrorCodes.FLOW_CONTROL_ERROR)
            else:
                self._let_write(stream)

    def take_settings(self, number: int, flags: int, payload: bytes) -> int | None:
        """Takes a SETTINGS frame. Returns None if it only acknowledges; else it is to be acknowledged, and then :meth:`widen`
        is to be called with what is returned.

        Raises:
            ConnectionFailedError: It makes no sense.
        """
        before = self._settings.stream_window
        if not self._settings.take(number, flags, payload):
            return None
        self.frame_size = self._settings.frame_size
        return self._settings.stream_window - before

    def widen(self, change: int) -> None:
        """Each open stream has room for so many bytes more; the number may be negative.

        Raises:
            ConnectionFailedError: Some stream's window is too large.
        """
        for stream in tuple(self._streams.values()) if change else ():
            stream.window += change
            if stream.window > frames.LARGEST_WINDOW:
                raise ConnectionFailedError(ErrorCodes.FLOW_CONTROL_ERROR, "a window too large")
            self._let_write(stream)

    def unblock(self) -> None:
        """Lets those write who waited, as far as there is room."""
        waiting, self._blocked = self._blocked, {}
        before: dict[ServerStream, None] = {}
        for stream in waiting:
            if self.paused or (self.window <= 0 and stream.has_unsent):
                before[stream] = None
            else:
                stream.flush()
        self._blocked = before | self._blocked

    def _let_write(self, stream: ServerStream) -> None:
        if stream.has_unsent and stream not in self._blocked:  # there it keeps its place
            stream.flush()
