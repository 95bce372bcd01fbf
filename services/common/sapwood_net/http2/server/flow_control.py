"""Flow control (RFC 9113, 5.2): how much a client takes, and which stream writes next when there is room again.

Streams that wait for the same window write in turn: a stream that had its turn and still waits goes to the end of the queue.
Settings that change the windows of all streams cost O(1), however many are open. Only a few streams write in a turn of the loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from h2.errors import ErrorCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import ConnectionFailedError
from sapwood_net.http2.wire.peer_settings import PeerSettings

_MOST_AT_ONCE = 32
"""Streams that write in one go when there is room; others follow in later turns of the event loop."""
_PATIENCE = 1.0
"""Seconds that a stream may wait for room before it counts as one whose client does not read."""


class Writer(Protocol):
    """A stream, as flow control knows it.

    Attributes:
        balance: Bytes that the client takes of it beyond ``FlowControl.stream_window``: bytes granted minus bytes sent.
    """

    balance: int

    @property
    def window(self) -> int:
        """Bytes that the client takes on this stream now."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait for the client."""
        ...

    def flush(self) -> None:
        """Sends what the windows and the socket allow."""
        ...

    def count_unread(self) -> None:
        """The client has not read pending data for ``_PATIENCE`` seconds."""
        ...

    def break_off(self, code: ErrorCodes) -> None:
        """Ends the stream: the client broke the protocol."""
        ...


class FlowingConnection(Protocol):
    """A connection, as flow control knows it."""

    def write_later(self) -> None:
        """More streams may write: :meth:`FlowControl.write_on` is to be called in a later turn."""
        ...


class FlowControl:
    """The windows of one connection.

    Args:
        streams: The connection's open streams, by number. Not copied.
        connection: Called when more streams may write.

    Attributes:
        window: Bytes of DATA that the client takes on the connection. Streams that write take from it.
        stream_window: Bytes that the client takes of a new stream. An open one has its ``balance`` more.
        frame_size: Bytes of the largest payload to send.
        paused: Whether the socket takes no more.
    """

    __slots__ = (
        "_blocked",
        "_connection",
        "_granted",
        "_largest",
        "_retries",
        "_settings",
        "_since",
        "_starved",
        "_streams",
        "_unwritable",
        "frame_size",
        "paused",
        "stream_window",
        "window",
    )

    def __init__(self, streams: Mapping[int, Writer], connection: FlowingConnection) -> None:
        self.window = self.stream_window = frames.USUAL_WINDOW
        self.frame_size = frames.USUAL_FRAME
        self.paused = False
        self._settings = PeerSettings()
        self._streams = streams
        self._connection = connection
        self._granted = frames.USUAL_WINDOW
        """Bytes that the connection's window began with, plus all bytes by which it has grown since."""
        self._largest = 0
        """An upper bound, in bytes, of the balance of every open stream."""
        self._blocked: OrderedDict[Writer, None] = OrderedDict()
        """Streams that wait for the connection's window."""
        self._unwritable: OrderedDict[Writer, None] = OrderedDict()
        """Streams that wait for the socket alone."""
        self._starved: OrderedDict[Writer, None] = OrderedDict()
        """Streams that wait for their own windows."""
        self._since: OrderedDict[Writer, float] = OrderedDict()
        """Waiting stream -> when it began to wait, by the monotonic clock. Streams that were counted as unread are not in it."""
        self._retries = 0
        """How many of the starved, from the first on, may have room now."""

    @property
    def sent(self) -> int:
        """Bytes of DATA that were sent on the connection."""
        return self._granted - self.window

    def block(self, stream: Writer) -> None:
        """Calls the stream's :meth:`Writer.flush` once there is room on the connection and its socket."""
        (self._blocked if stream.has_unsent else self._unwritable)[stream] = None
        self._await_room(stream)

    def starve(self, stream: Writer) -> None:
        """Calls the stream's :meth:`Writer.flush` once the client takes more of it."""
        self._starved[stream] = None
        self._await_room(stream)

    def _await_room(self, stream: Writer) -> None:
        """Each that begins to wait looks at two of those that have waited longest: no timer is needed."""
        now = time.monotonic()
        self._since.setdefault(stream, now)
        for _ in range(2):
            oldest, since = next(iter(self._since.items()), (stream, now))
            if now - since < _PATIENCE:
                return
            del self._since[oldest]
            oldest.count_unread()

    def forget(self, stream: Writer) -> None:
        """Drops a stream that is over, or waits no more."""
        for waiting in (self._blocked, self._unwritable, self._starved):
            if waiting:
                waiting.pop(stream, None)
        self._since.pop(stream, None)

    def take_window(self, number: int, payload: bytes) -> None:
        """Takes a WINDOW_UPDATE frame, of the connection or of a stream that is open or over.

        Raises:
            ConnectionFailedError: The connection's window grows by nothing or too large. A stream's ends only the stream.
        """
        increment = int.from_bytes(payload, "big") & 0x7FFFFFFF
        stream = self._streams.get(number)
        if number == 0:
            self.window += increment
            self._granted += increment
            if not increment:
                raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a window grows by nothing")
            if self.window > frames.LARGEST_WINDOW:
                raise ConnectionFailedError(ErrorCodes.FLOW_CONTROL_ERROR, "a window too large")
            self.unblock()
        elif stream is not None:
            stream.balance += increment
            if not increment:
                stream.break_off(ErrorCodes.PROTOCOL_ERROR)
            elif stream.window > frames.LARGEST_WINDOW:
                stream.break_off(ErrorCodes.FLOW_CONTROL_ERROR)
            else:
                self._largest = max(self._largest, stream.balance)
                if self._starved and stream in self._starved:
                    del self._starved[stream]
                    stream.flush()

    def take_settings(self, number: int, flags: int, payload: bytes) -> bool:
        """Takes a SETTINGS frame. Returns whether it is to be acknowledged, after which :meth:`unblock` is to be called.

        Raises:
            ConnectionFailedError: It is malformed, or makes a stream's window too large.
        """
        if not self._settings.take(number, flags, payload):
            return False
        self.frame_size = self._settings.frame_size
        if self._settings.stream_window > self.stream_window:
            self._retries = len(self._starved)
        self.stream_window = self._settings.stream_window
        if self.stream_window + self._largest > frames.LARGEST_WINDOW:
            self._largest = max((stream.balance for stream in self._streams.values()), default=0)
            if self.stream_window + self._largest > frames.LARGEST_WINDOW:
                raise ConnectionFailedError(ErrorCodes.FLOW_CONTROL_ERROR, "a window too large")
        return True

    def unblock(self) -> None:
        """Lets waiting streams write as far as there is room: some now, the others in later turns."""
        if self.write_on():
            self._connection.write_later()

    def write_on(self) -> bool:
        """Lets some of the waiting streams that have room write. Returns whether others are left."""
        for _ in range(_MOST_AT_ONCE):
            if self.paused:
                return False
            if self._unwritable:
                stream, _ = self._unwritable.popitem(last=False)
            elif self._blocked and self.window > 0:
                stream, _ = self._blocked.popitem(last=False)
            elif self._starved and self._retries:
                stream, _ = self._starved.popitem(last=False)
                self._retries -= 1
            else:
                self._retries = 0
                return False
            stream.flush()
        return True
