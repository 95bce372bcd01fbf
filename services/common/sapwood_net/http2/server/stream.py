"""One stream of a connection: gRPC messages in and out, within the windows of both sides."""

from __future__ import annotations

import asyncio
from typing import Protocol

from h2.errors import ErrorCodes

from sapwood_net.errors import CallError
from sapwood_net.http2.server.flow_control import FlowControl
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.message_reader import PREFIX, MessageReader

WINDOW = 1024 * 1024
"""Bytes that a client may send in messages that were not taken yet, besides the message that is on its way."""
_GRANTED = WINDOW // 2
"""Bytes taken after which the client may send as many again: WINDOW_UPDATE says so."""
CRUMB = 64
"""Bytes: a DATA frame with fewer that completes no message counts as a frame without content."""
_LIGHT = 4 * 1024
"""Bytes that a stream may hold uncounted, and the growth after which its bytes are counted again."""
_LARGE = 64 * 1024
"""Bytes: a larger request counts as held while its call runs."""
_EACH = 128
"""Bytes of memory that a whole message takes besides its own."""
_CALL = 8 * 1024
"""Bytes that are counted for a large call in addition to its messages: its task and state, while it waits for its turn."""
_UNREAD = 16 * 1024
"""Bytes that a call counts whose client does not read, for all that works for it."""


class StreamReceiver(Protocol):
    """Gets a stream's events. Its methods are called by the connection: they must not block, and not raise."""

    def received(self, message: bytes, compressed: bool) -> None:
        """A whole message came. Once it is taken, :meth:`ServerStream.taken` is to be called."""
        ...

    def too_large(self, size: int) -> None:
        """A message of ``size`` bytes would follow, which is more than is taken."""
        ...

    def overloaded(self, error: CallError) -> None:
        """The stream holds too much: it is to drop it, and to end with the error."""
        ...

    def half_closed(self) -> None:
        """The client sends nothing more."""
        ...

    def gone(self) -> None:
        """The client has reset the stream, or its connection is over: nothing that is written reaches it."""
        ...


class StreamConnection(Protocol):
    """A connection, as its streams know it."""

    @property
    def writable(self) -> bool:
        """Whether the socket takes more."""
        ...

    def send(self, data: bytes) -> None:
        """Writes whole frames."""
        ...

    def send_headers(self, stream: int, block: bytes, *, end: bool = False) -> None:
        """Writes a header block; ``end`` ends the stream with it."""
        ...

    def forget(self, stream: ServerStream) -> None:
        """Forgets a stream that is over."""
        ...

    def hold(self, stream: ServerStream, size: int) -> None:
        """Notes that the stream holds ``size`` bytes from now on. May call its :meth:`ServerStream.overload`."""
        ...

    def count_fault(self) -> None:
        """Counts a stream on which the client broke the protocol. Raises ConnectionFailedError for too many."""
        ...


class ServerStream:
    """Messages of one call. All methods are for the event loop of its connection.

    Args:
        connection: Its connection.
        flow: The connection's windows.
        number: The stream's id.
        most_bytes: The largest message taken.
    """

    __slots__ = (
        "_connection",
        "_end",
        "_flow",
        "_heavy",
        "_held",
        "_kept",
        "_messages",
        "_owed",
        "_prefix",
        "_receiver",
        "_undelivered",
        "_unread",
        "_unsent",
        "_waiters",
        "_weight",
        "balance",
        "closed",
        "number",
        "remote_open",
    )

    def __init__(self, connection: StreamConnection, flow: FlowControl, number: int, most_bytes: int) -> None:
        self.number = number
        self.balance = 0
        """Bytes that the client granted it beyond those that it grants each stream, minus bytes sent."""
        self.closed = False
        """Whether nothing is sent or received any more."""
        self.remote_open = True
        """Whether the client may send more."""
        self._connection = connection
        self._flow = flow
        self._prefix = b"%c%c%b" % (frames.DATA, 0, number.to_bytes(4, "big"))
        self._receiver: StreamReceiver | None = None
        self._messages = MessageReader(most_bytes)
        self._held = 0
        """Bytes of whole messages that have not been taken yet."""
        self._kept = 0
        """Bytes of a message that was taken and waits to be parsed, or is large and its call runs."""
        self._weight = 0
        """Bytes that this holds, as the connection counts them."""
        self._heavy = _LIGHT
        """Bytes beyond which they are counted again."""
        self._owed = 0
        """Bytes received that no WINDOW_UPDATE has given back yet."""
        self._undelivered: int | None = None
        """Bytes of DATA that must still come by the client's content-length; None if it gave none."""
        self._unread = False
        """Whether the client has not read pending data for a while."""
        self._unsent = bytearray()
        self._end: bytes | None = None
        """The block of the trailers, once the last message was written."""
        self._waiters: list[asyncio.Future[None]] = []

    def take_at_most(self, most_bytes: int) -> None:
        """Lowers the size of the largest message taken, in bytes."""
        self._messages.most_bytes = most_bytes

    def follow(self, receiver: StreamReceiver) -> None:
        """Names the receiver. To be called before anything happens."""
        self._receiver = receiver

    def expect(self, content_length: int) -> None:
        """Takes the content-length: the bytes of DATA that are to come. To be called before any do."""
        self._undelivered = content_length

    @property
    def ready(self) -> bool:
        """Whether a message that is written now leaves at once. If not, it is better sent later, together with others."""
        return not self._unsent and not self.closed and self._connection.writable

    @property
    def window(self) -> int:
        """Bytes that the client takes of it now; below 0 after settings that made the window smaller than what was sent."""
        return self._flow.stream_window + self.balance

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait for the client."""
        return bool(self._unsent)

    def write(self, message: bytes) -> None:
        """Sends a message as soon as the client takes it. After the end does nothing."""
        if self.closed or self._end is not None:
            return
        flow, length = self._flow, len(message)
        size = length + PREFIX
        if (
            not self._unsent
            and self._connection.writable
            and size <= flow.stream_window + self.balance
            and size <= flow.window
            and size <= flow.frame_size
        ):
            self.balance -= size
            flow.window -= size
            self._connection.send(
                b"%b%b\0%b%b" % (size.to_bytes(3, "big"), self._prefix, length.to_bytes(4, "big"), message)
            )
            return
        self._unsent += b"\0%b" % length.to_bytes(4, "big")
        self._unsent += message
        self.flush()
        if len(self._unsent) > self._heavy:
            self._weigh()

    def send_headers(self, block: bytes) -> None:
        """Sends the response's header block. Once, before any message."""
        if not self.closed:
            self._connection.send_headers(self.number, block)

    def finish(self, trailers: bytes) -> None:
        """Ends the stream after all that was written, with a header block."""
        if not self.closed and self._end is None:
            self._end = trailers
            self.flush()

    def flush(self) -> None:
        """Sends what the windows and the socket allow. The connection calls it when one of them allows more."""
        connection, flow = self._connection, self._flow
        while self._unsent and connection.writable and not self.closed:
            size = min(len(self._unsent), self.window, flow.window, flow.frame_size)
            if size <= 0:
                break
            data = bytes(memoryview(self._unsent)[:size])
            del self._unsent[:size]
            self.balance -= size
            flow.window -= size
            connection.send(size.to_bytes(3, "big") + self._prefix + data)
        if self._unsent:
            if self.window > 0:
                flow.block(self)
            else:
                flow.starve(self)
        elif self.closed:
            return
        elif self._end is not None:
            connection.send_headers(self.number, self._end, end=True)
            if self.remote_open:  # what it may still send is of no use
                connection.send(frames.reset(self.number, ErrorCodes.NO_ERROR))
            self._close()
        elif connection.writable:
            flow.forget(self)
            if self._unread:
                self._unread = False
                self._weigh()
            self._wake()
        else:
            flow.block(self)

    def count_unread(self) -> None:
        """Counts it as one whose client does not read, until the client does. May end the stream."""
        self._unread = True
        self._weigh()

    async def drained(self) -> None:
        """Returns once :attr:`ready`, or once the stream is over."""
        while not self.ready and not self.closed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            if not self._unsent:
                self._flow.block(self)
            await waiter

    def reset(self, code: ErrorCodes) -> None:
        """Ends the stream at once, without a call of its receiver."""
        if not self.closed:
            self._connection.send(frames.reset(self.number, code))
            self._close()

    def taken(self, message_bytes: int) -> None:
        """Notes that a received message of ``message_bytes`` was taken and is held no more."""
        self._held -= message_bytes + _EACH
        if self._weight:
            self._weigh()
        if self._owed - self._held > _GRANTED:
            self._grant()

    def keep(self, size: int, *, waits: bool = False) -> None:
        """Notes that the message taken last holds ``size`` bytes until the next one is taken. May end the stream.

        Args:
            size: A small one is not counted,
            waits: unless it waits to be parsed: so may thousands.
        """
        kept = size if size >= _LARGE or waits else 0
        if kept != self._kept:
            self._kept = kept
            self._weigh()

    def overload(self, error: CallError) -> None:
        """Drops the stream's messages and ends it with the error. The connection calls it where too much is held."""
        self._weight = 0  # it is not counted any more
        if self._receiver is not None:
            self._receiver.overloaded(error)

    def _weigh(self) -> None:
        """Tells the connection how much is held, if that is much or was."""
        size = self._held + self._kept + len(self._messages.pending) + len(self._unsent)
        self._heavy = size + _LIGHT
        if self._unread:
            size += _UNREAD
        weight = size + _CALL if size > _LIGHT and not self.closed else 0
        if weight != self._weight:
            self._weight = weight
            self._connection.hold(self, weight)

    def take_data(self, payload: bytes, wire_bytes: int) -> bool:
        """Takes the payload of a DATA frame from the connection, and the bytes of the windows that it used up.

        Returns:
            Whether the frame had content: it completed a message, or brought at least ``CRUMB`` bytes.
        """
        if not self.remote_open:
            self.break_off(ErrorCodes.STREAM_CLOSED)
            return True
        self._owed += wire_bytes
        if self._owed > WINDOW:
            self.break_off(ErrorCodes.FLOW_CONTROL_ERROR)
            return True
        if self._undelivered is not None:
            self._undelivered -= len(payload)
            if self._undelivered < 0:
                self.break_off(ErrorCodes.PROTOCOL_ERROR)
                return True
        messages, receiver = self._messages, self._receiver
        assert receiver is not None
        if messages.refused is not None:
            return len(payload) >= CRUMB
        found = messages.feed(payload)
        for message, compressed in found:
            self._held += len(message) + _EACH
            receiver.received(message, compressed)
            if self.closed:
                return True
        if messages.refused is not None:
            receiver.too_large(messages.refused)
            return True
        if self._held > self._heavy or len(messages.pending) > self._heavy:
            self._weigh()
        if self._owed - self._held > _GRANTED:
            self._grant()
        return found != [] or len(payload) >= CRUMB

    def take_end(self) -> None:
        """Takes the end of what the client sends, from the connection."""
        if self.closed:
            return
        if not self.remote_open:
            self.break_off(ErrorCodes.STREAM_CLOSED)
        elif self._messages.pending or self._undelivered:  # a message lacks its end, or the content
            self.break_off(ErrorCodes.PROTOCOL_ERROR)
        else:
            self.remote_open = False
            assert self._receiver is not None
            self._receiver.half_closed()

    def break_off(self, code: ErrorCodes) -> None:
        """Ends the stream as the client broke the protocol. Client and receiver get an error."""
        if not self.closed:
            connection = self._connection
            connection.send(frames.reset(self.number, code))
            self._lose()
            connection.count_fault()

    def take_gone(self) -> None:
        """Ends the stream as the client has reset it or left. The receiver is told."""
        if not self.closed:
            self.remote_open = False
            self._lose()

    def _lose(self) -> None:
        receiver = self._receiver
        assert receiver is not None
        self._close()
        receiver.gone()

    def _grant(self) -> None:
        """Lets the client send more bytes: as many as were taken since the last window update."""
        increment = self._owed - self._held
        if self.remote_open and not self.closed:
            self._owed -= increment
            self._connection.send(frames.window_update(self.number, increment))

    def _close(self) -> None:
        self.closed = True
        self._receiver = None  # it refers to the stream: neither is to wait for the garbage collector
        self._unsent.clear()
        self._messages.clear()
        if self._weight:
            self._weigh()
        self._wake()
        self._connection.forget(self)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
