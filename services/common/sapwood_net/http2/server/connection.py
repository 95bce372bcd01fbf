"""The server's end of an HTTP/2 connection (RFC 9113) that carries gRPC and nothing else, on the event loop.

Frames are packed and unpacked in place (:class:`FrameReader`); ``hpack`` decodes the headers, and a block that comes again only
once (:class:`HeaderReader`). Header fields that are sent enter no table, so that they cost no look-up and no memory.

Each frame costs time linear in its length. Held for a client are at most ``MOST_STREAMS`` streams, ``WINDOW`` bytes and one
message a stream, and ``_MOST_UNREAD`` bytes of answers to its frames.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_net.errors import CallError, ResourceExhaustedError
from sapwood_net.http2.server.flow_control import FlowControl
from sapwood_net.http2.server.incoming import IncomingFrames
from sapwood_net.http2.server.limits import frame_rates
from sapwood_net.http2.server.limits.frame_rates import FrameRates
from sapwood_net.http2.server.limits.lifetime import Due, Lifetime, Timeouts
from sapwood_net.http2.server.limits.shared import SharedLimits
from sapwood_net.http2.server.stream import WINDOW, ServerStream
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frame_reader import FrameReader
from sapwood_net.http2.wire.frames import ConnectionFailedError
from sapwood_net.http2.wire.header_reader import MOST_HEADER_BYTES
from sapwood_net.http2.wire.request_head import RequestHead
from sapwood_net.http2.wire.stream_ids import StreamIds
from sapwood_net.pacing.body_memory import BodyMemory

# How a connection begins: what the server says first, and whether the client speaks HTTP/2 at all (RFC 9113, 3.4).
CONNECTION_WINDOW = 16 * 1024 * 1024
"""Bytes that a client may send on all streams together before the server acknowledges them."""
_WRONG_PROTOCOL = b"this port speaks gRPC over HTTP/2\n"


class WrongProtocolError(Exception):
    """The client speaks something else. ``answer`` says so in its protocol; empty if that is unknown."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("the client does not speak HTTP/2")
        self.answer = answer


def server_greeting(most_streams: int) -> bytes:
    """The server's settings and its window; ``most_streams`` is how many streams the client may have open."""
    settings = (
        (SettingCodes.MAX_CONCURRENT_STREAMS, most_streams),
        (SettingCodes.INITIAL_WINDOW_SIZE, WINDOW),
        (SettingCodes.MAX_HEADER_LIST_SIZE, MOST_HEADER_BYTES),
    )
    return frames.settings(settings) + frames.window_update(0, CONNECTION_WINDOW - frames.USUAL_WINDOW)


class Greeting:
    """Waits for the client's preface.

    Attributes:
        over: Whether it has come.
    """

    __slots__ = ("_received", "over")

    def __init__(self) -> None:
        self.over = False
        self._received = b""

    def take(self, data: bytes) -> bytes:
        """Takes what has come. Returns the frames after the preface; nothing before the head of the first one is here.

        Raises:
            WrongProtocolError: The client does not speak HTTP/2.
            ConnectionFailedError: The first frame is not SETTINGS.
        """
        received = self._received = self._received + data
        if not received.startswith(frames.PREFACE[: len(received)]):
            answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            raise WrongProtocolError(
                answer % (len(_WRONG_PROTOCOL), _WRONG_PROTOCOL) if b"HTTP/1." in received else b""
            )
        start = len(frames.PREFACE)
        if len(received) < start + frames.HEADER:
            return b""
        self._received = b""
        self.over = True
        if received[start + 3] != frames.SETTINGS or received[start + 4] & frames.ACK:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        return received[start:]


logger = logging.getLogger(__name__)

MOST_STREAMS = 4096
"""Calls at a time. Each holds about 2 KB before its first message, for a few bytes that the client sends."""
MOST_UNKNOWN_STREAMS = 64
"""Calls at a time of a client that has shown no valid key yet, where keys are asked for."""
_GRANTED = CONNECTION_WINDOW // 2
"""Bytes taken after which the client may send as many again: WINDOW_UPDATE says so."""
_PING, _LAST_PING = b"sapwood.", b"goodbye."
"""Payloads of pings that ask whether the client is there, and whether it has heard that it is to go."""
_CLOSE_SECONDS = 1.0
_LIGHT = 1024
"""Bytes of a call or two: a connection that has no more to be read continues before those with much."""
_MUCH = 64 * 1024
"""Bytes read at once after which other connections read first: uvloop would continue for 8 MB."""
_MOST_UNREAD = 1024 * 1024
"""The most bytes that wait for a client that continues sending. Messages stop long before; answers to its pings do not."""


class ServerConnection(asyncio.Protocol):
    """One client's connection. Implements ``FrameConnection``, ``StreamConnection`` and ``time_share.Worker``.

    Args:
        owner: Gets a call for each event.
        most_bytes: The largest message taken.
        most_streams: Calls at a time.
        shared: The state that it shares with other connections.
        timeouts: How long each state may last.
        stranger: Whether the client has to show a key before it may have and do as much as any.
    """

    def __init__(
        self,
        owner: ConnectionOwner[ServerConnection],
        most_bytes: int,
        most_streams: int,
        shared: SharedLimits,
        timeouts: Timeouts,
        *,
        stranger: bool = False,
    ) -> None:
        self.owner = owner
        self.peer = ""
        """The client's address as grpcio writes it."""
        self._most_bytes = most_bytes
        self._most_streams = most_streams
        self._stranger = stranger
        self._shared = shared
        self._share = shared.strangers if stranger else shared.time
        self._breaths = shared.breaths
        self._writes = shared.writes
        self._total = shared.strangers_calls if stranger else shared.calls
        self._most_held = max(shared.memory.most // 2, most_bytes + WINDOW)
        self._transport: asyncio.Transport | None = None
        self._greeting: Greeting | None = Greeting()
        """None once the client has greeted."""
        self._reader = FrameReader(stranger=stranger)
        self._behind = False
        """Whether it has read more than it had time to work on."""
        self._breathes = False
        """Whether it has read much, and waits for its turn to read on."""
        self._rates = FrameRates(stranger=stranger)
        self.answers = 0
        """Header blocks that were sent."""
        self._has_table = True
        """Whether the client still expects header fields to enter its table."""
        self._streams: dict[int, ServerStream] = {}
        # Its parts hold no references to it: otherwise the garbage collector would have too much work after a flood of short
        # connections.
        own = weakref.proxy(self)
        self._messages = HeldMessages(shared.memory, WINDOW if stranger else self._most_held, own)
        self._flow = FlowControl(self._streams, own)
        self._ids = StreamIds()
        self._frames = IncomingFrames(own, self._streams, self._flow, self._ids, self._rates)
        self._closing = False
        self._closer: asyncio.TimerHandle | None = None
        self._life = Lifetime(timeouts)

    @property
    def writable(self) -> bool:
        # A socket that has failed takes all data and reports its failure in the event loop's next turn, which never comes while a
        # handler finds it writable again and again.
        return not self._flow.paused and self._transport is not None and not self._transport.is_closing()

    @property
    def open_calls(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self._streams

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._writes.add(self._transport, data)

    def send_headers(self, stream: int, block: bytes, *, end: bool = False) -> None:
        if self._has_table:
            self._has_table = False
            block = frames.NO_TABLE + block
        self.answers += 1
        self.send(frames.header_frames(stream, block, self._flow.frame_size, end=end))

    def hold(self, stream: ServerStream, size: int) -> None:
        self._messages.set(stream, size)

    def forget(self, stream: ServerStream) -> None:
        self._streams.pop(stream.number, None)
        self._flow.forget(stream)
        self._total.open -= 1
        if stream.remote_open:
            self._ids.cut_off(stream.number)
        if self._closing and not self._streams:
            self._close_transport()

    def check(self, now: float) -> None:
        """Pings, retires or gives up a client that was silent or idle. To be called every few seconds, with the loop's time."""
        if self._transport is None:
            return
        due = self._life.check(
            now,
            greeted=self._greeting is None,
            busy=bool(self._streams),
            last_stream=self._ids.last,
            closing=self._transport.is_closing(),
        )
        if due is Due.PING:
            self.send(frames.frame(frames.PING, 0, 0, _PING))
        elif due is Due.RETIRE:
            # Calls that are on their way are still answered. Once the client has answered this, a second GOAWAY names the last.
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
        if self._greeting is None:
            self._goaway(ErrorCodes.NO_ERROR, self._ids.last)
        if not self._streams:
            self._close_transport()

    def close(self) -> None:
        """Closes, after what was written; calls that run find their client gone."""
        self._closing = True
        transport, self._transport = self._transport, ClosedTransport()
        self._end_streams()
        if transport is None or isinstance(transport, ClosedTransport):
            return
        self._writes.flush(transport)
        # A client that reads nothing would keep the connection for ever.
        self._closer = asyncio.get_running_loop().call_later(_CLOSE_SECONDS, transport.abort)
        transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets the client."""
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
        else:
            self.peer = "unix:"
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            logger.info("%s does not offer h2 in its TLS handshake (ALPN)", self.peer)
            self._transport.close()
            return
        self.send(server_greeting(self._most_streams))
        self.owner.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._transport = ClosedTransport()
        self._share.drop(self)
        if self._closer is not None:
            self._closer.cancel()
        self._end_streams()
        self.owner.connection_lost(self)

    def eof_received(self) -> bool:
        """Has the connection close, whether or not the client still reads."""
        self.close()
        return False

    def pause_writing(self) -> None:
        self._flow.paused = True

    def resume_writing(self) -> None:
        self._flow.paused = False
        self._flow.unblock()

    def data_received(self, data: bytes) -> None:
        self._life.heard = True
        share = self._share
        try:
            if self._greeting is not None:
                data = self._greet(self._greeting, data)
            self._behind = self._reader.feed(data, self._frames, share.is_over)
        except ConnectionFailedError as error:
            self._fail(error)
        if share.measuring:
            share.end()
            self._defer()
        if self._frames.consumed > _GRANTED or self._flow.paused:
            self._settle()
        if len(data) >= _MUCH and self._transport is not None and not self._transport.is_closing():
            self._breathes = True
            self._transport.pause_reading()
            self._breaths.enter(self._breathe)

    def _breathe(self) -> None:
        self._breathes = False
        if not self._behind and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def go_on(self, until: float) -> bool:
        assert self._transport is not None
        if self._transport.is_closing():
            return self._closing and self._end_some(lambda: self._share.clock() >= until)
        if self._behind:
            self._life.heard = True
            clock = self._share.clock
            try:
                self._behind = self._reader.feed(b"", self._frames, lambda: clock() >= until)
            except ConnectionFailedError as error:
                self._fail(error)
            self._settle()
            if self._transport.is_closing():
                return bool(self._streams)
            if not self._behind and not self._breathes:
                self._transport.resume_reading()
        return (self.writable and self._flow.write_on()) or self._behind

    def _greet(self, greeting: Greeting, data: bytes) -> bytes:
        """Returns the frames after the client's preface."""
        assert self._transport is not None
        if self._transport.is_closing():  # it was refused
            return b""
        try:
            data = greeting.take(data)
        except WrongProtocolError as error:
            self.send(error.answer)
            self._hold()
            return b""
        finally:
            if greeting.over:
                self._greeting = None
        return data

    def _fail(self, error: ConnectionFailedError) -> None:
        self._goaway(error.code, self._ids.last, str(error))
        self.owner.connection_failed(self, error)
        self._hold()

    def _hold(self) -> None:
        """Ends the connection. Its socket closes later: at once, what the client has sent would cost it our last words."""
        assert self._transport is not None
        self._writes.flush(self._transport)
        self._shared.tarpit.hold(self._transport)
        self.connection_lost(None)

    def _defer(self) -> None:
        """Continues in later turns if time was over."""
        if self._behind and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            light = len(self._reader.pending) <= _LIGHT and self._transport.get_extra_info("light", True)
            self._share.add(self, light=light)

    def _close_transport(self) -> None:
        """Closes the socket after what was written."""
        if self._transport is not None:
            self._writes.flush(self._transport)
            self._transport.close()

    def _settle(self) -> None:
        """Lets the client send more on all streams; gives up a client that sends on and reads nothing."""
        assert self._transport is not None
        if self._frames.consumed > _GRANTED:
            self.send(frames.window_update(0, self._frames.consumed))
            self._frames.consumed = 0
        if self._flow.paused and self._transport.get_write_buffer_size() > _MOST_UNREAD:
            logger.info("%s reads no answers: its connection is given up", self.peer)
            self._transport.abort()

    def _end_streams(self) -> None:
        """Tells all streams that their client is gone: hundreds of connections may be lost in one turn, many streams each."""
        share = self._share
        goes_on = share.measuring
        if self._end_some(share.is_over):
            share.add(self)
        if share.measuring and not goes_on:
            share.end()

    def _end_some(self, is_over: Callable[[], bool]) -> bool:
        while self._streams:
            if is_over():
                return True
            self._streams.popitem()[1].take_gone()
        return False

    @property
    def takes_more(self) -> bool:
        open_now = len(self._streams)
        return not self._closing and open_now < self._most_streams and self._total.allows(open_now)

    def open_stream(self, number: int, head: RequestHead, ends: bool) -> None:
        self._total.open += 1
        stream = self._streams[number] = ServerStream(self, self._flow, number, self._most_bytes)
        if head.content_length is not None:
            stream.expect(head.content_length)
        self.owner.open_call(self, stream, head)
        if ends and not stream.closed:
            stream.take_end()

    def write_later(self) -> None:
        """Lets streams that wait for room write on in a later turn."""
        self._share.add(self)

    def take_pong(self, payload: bytes) -> None:
        if payload == _LAST_PING and self._life.retired:
            self.close_gently()

    def know(self) -> None:
        """Notes that the client has shown a valid key: it may have as many calls at a time as any."""
        if self._stranger:
            self._stranger = False
            self._most_streams = MOST_STREAMS
            self._share = self._shared.time
            self._total.open -= len(self._streams)
            self._total = self._shared.calls
            self._total.open += len(self._streams)
            self._messages.most = self._most_held
            self._rates.know()
            self._reader.stranger = False
            self.send(frames.settings(((SettingCodes.MAX_CONCURRENT_STREAMS, MOST_STREAMS),)))

    def count_refused(self) -> None:
        """Counts a call that was refused on its headers. Raises ConnectionFailedError for too many."""
        self._rates.take(frame_rates.REFUSED)

    def count_fault(self) -> None:
        self._rates.take(frame_rates.FAULT)

    def count_overloaded(self) -> None:
        """Counts a call that ended as too much was held. Too many end the connection in a turn of its own: anybody who brought
        more than there is room for may be another."""
        try:
            self._rates.take(frame_rates.OVERLOAD)
        except ConnectionFailedError as error:
            asyncio.get_running_loop().call_soon(self._fail_if_open, error)

    def _fail_if_open(self, error: ConnectionFailedError) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._fail(error)

    def _goaway(self, code: ErrorCodes, last: int, text: str = "") -> None:
        payload = last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()
        self.send(frames.frame(frames.GOAWAY, 0, 0, payload))


class ClosedTransport(asyncio.Transport):
    """Takes the place of a closed socket, so that calls that do not know yet may continue writing."""

    def write(self, data: object) -> None:
        """Drops the data."""

    def is_closing(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Is closed already."""

    def abort(self) -> None:
        """Is closed already."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Does nothing: there is no protocol to inform."""

    def get_write_buffer_size(self) -> int:
        """Zero bytes."""
        return 0


ConnectionT_contra = TypeVar("ConnectionT_contra", contravariant=True)


class ConnectionOwner(Protocol[ConnectionT_contra]):
    """The server as its connections know it. They call these methods, which raise only the errors that they name."""

    def connection_made(self, connection: ConnectionT_contra) -> None:
        """The connection has begun. It never does if its TLS handshake fails."""

    def connection_lost(self, connection: ConnectionT_contra) -> None:
        """The connection is over."""

    def connection_failed(self, connection: ConnectionT_contra, error: ConnectionFailedError) -> None:
        """The client broke the protocol, or a rule: the connection ends."""

    def open_call(self, connection: ConnectionT_contra, stream: ServerStream, head: RequestHead) -> None:
        """Begins a call whose head is well formed: names the stream's receiver, or ends the stream.

        Raises:
            ConnectionFailedError: The client sends too many calls of this kind.
        """


# Bounds the memory of one connection's messages: those in part, those not read yet, and large ones whose calls run.
class HeavyStream(Protocol):
    """A stream that holds much."""

    def overload(self, error: CallError) -> None:
        """Drops the stream's messages; its call ends with the error."""
        ...


class Holder(Protocol):
    """The connection whose messages are held."""

    def count_overloaded(self) -> None:
        """A call was ended because too many bytes were held."""
        ...


class HeldMessages:
    """The messages of one connection. Its largest call ends where it holds too much, or where all do and it holds the most.

    Args:
        memory: The memory of all connections.
        most_bytes: The most bytes that this one may hold.
        holder: Called for each call that ends for it.

    Attributes:
        total: Bytes that are held now.
        most: The most bytes that this one may hold.
    """

    def __init__(self, memory: BodyMemory, most_bytes: int, holder: Holder) -> None:
        self.total = 0
        self.most = most_bytes
        self._memory = memory
        self._holder = holder
        self._sizes: dict[HeavyStream, int] = {}

    def set(self, stream: HeavyStream, size: int) -> None:
        """Notes that a stream holds ``size`` bytes from now on. It, or another one, may be overloaded by that."""
        before = self._sizes.pop(stream, 0)
        if size:
            self._sizes[stream] = size
        self.total += size - before
        if size < before:
            self._memory.shrink(self, before - size)
        elif size > before:
            self._memory.grow(self, size - before)
            while self.total > self.most:
                largest, freed = self._forget_largest()
                self._memory.shrink(self, freed)
                largest.overload(
                    ResourceExhaustedError("the messages of this connection hold more than is allowed", retry_after=1.0)
                )
                self._holder.count_overloaded()

    def fail(self, error: CallError) -> None:
        """Ends the largest call: all connections hold too much, and this one, which the memory has released, the most."""
        largest, _ = self._forget_largest()
        if self.total:
            self._memory.grow(self, self.total)
        largest.overload(ResourceExhaustedError(error.message, retry_after=error.retry_after))
        self._holder.count_overloaded()

    def _forget_largest(self) -> tuple[HeavyStream, int]:
        largest = max(self._sizes, key=self._sizes.__getitem__)
        size = self._sizes.pop(largest)
        self.total -= size
        return largest, size
