"""One gRPC call on a stream, as servicers know calls: a ``grpc.aio.ServicerContext`` without grpcio's thread below it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Never

import grpc
from h2.errors import ErrorCodes

from sapwood_net.errors import CallError, InvalidArgumentError, ResourceExhaustedError
from sapwood_net.http2.server.gate import Tenant
from sapwood_net.http2.server.limits.shared import SharedLimits
from sapwood_net.http2.server.refusal import StatusOf
from sapwood_net.http2.server.stream import ServerStream
from sapwood_net.http2.wire import encoding
from sapwood_net.http2.wire.metadata import (
    Metadata,
    closing_block,
    metadata_block,
    opening_block,
    read_metadata,
    read_timeout,
)
from sapwood_net.http2.wire.request_head import RequestHead

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 2
"""Requests of a stream that are read before other calls have their turn."""
_HEAVY = 16 * 1024
"""Bytes from which a request waits for its turn to be parsed: it may have thousands of fields."""

Parse = Callable[[bytes], Any]
Serialize = Callable[[Any], bytes]


class ServerCall(grpc.aio.ServicerContext[Any, Any]):
    """Messages in and out, metadata, deadline and status of a call. Implements ``StreamReceiver``.

    Args:
        stream: The stream that carries it.
        head: The header fields that began it.
        peer: The client's address.
        parse: Makes requests of bytes.
        serialize: Makes bytes of responses.
        most_bytes: The largest request.
        status_of: Says what ends the call with an error.
        shared: The limits that all calls share.
        tenant: Whose key it came with.
        one_request: Whether it has exactly one request; further ones are dropped.
    """

    def __init__(
        self,
        stream: ServerStream,
        head: RequestHead,
        peer: str,
        parse: Parse,
        serialize: Serialize,
        most_bytes: int,
        status_of: StatusOf,
        shared: SharedLimits,
        tenant: Tenant | None = None,
        *,
        one_request: bool = False,
    ) -> None:
        fields = head.fields
        self.headers = head.headers
        """The header fields that began it. Not to be changed."""
        self.tenant = tenant
        """The tenant whose key it came with; None where no key is asked for."""
        self._stream = stream
        self._metadata: Metadata | None = None
        self._peer = peer
        self._parse = parse
        self._serialize = serialize
        self._most_bytes = most_bytes
        self._status_of = status_of
        self._shared = shared
        self._read = 0
        """Requests that were read since the reader last had to wait."""
        self._one_request = one_request
        self._received = False
        self._encoding = fields.get(b"grpc-encoding", b"identity")
        timeout = fields.get(b"grpc-timeout")
        seconds = None if timeout is None else read_timeout(timeout)
        self.deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        """Seconds, by the event loop's clock; None without a deadline."""
        self._requests: deque[tuple[bytes, bool]] = deque()
        """Requests that were not read, each with whether it is compressed."""
        self._requests_over = False
        self._problem: CallError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._opened = False
        self._ended = False
        self._initial: Iterable[tuple[str, str | bytes]] = ()
        self._trailing: Iterable[tuple[str, str | bytes]] = ()
        self._trailing_block = b""
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._callbacks: list[Callable[[Any], None]] = []
        self._on_begin: Callable[[], None] | None = None
        self._on_gone: Callable[[], None] | None = None

    def follow(self, on_begin: Callable[[], None] | None, on_gone: Callable[[], None]) -> None:
        """Names what is called once the first request is here (or that there will be none), and when the client has left."""
        self._on_begin = on_begin
        self._on_gone = on_gone

    # The methods of grpc.aio that servicers may use.

    async def read(self) -> Any:
        """The next request; ``grpc.aio.EOF`` after the last.

        Raises:
            ResourceExhaustedError: It is too large.
            InvalidArgumentError: It cannot be decompressed, or is no message of the method's.
        """
        while not self._requests:
            if self._problem is not None:
                raise self._problem
            if self._requests_over:
                return grpc.aio.EOF
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._read = 0
        self._read += 1
        if self._read > _READ_AT_ONCE:
            self._read = 1
            await self._shared.breaths.wait()
        message, compressed = self._requests.popleft()
        size = len(message)
        try:
            if compressed:
                message = await self._unfold(message)
        except encoding.TooLargeError:
            raise self._too_large(self._most_bytes + 1) from None
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error
        finally:
            self._stream.taken(size)
        heavy = len(message) >= _HEAVY
        self._stream.keep(len(message), waits=heavy)
        if heavy:
            await self._shared.heavy.turn(self._caller())
            self._stream.keep(len(message))
        try:
            return self._parse(message)
        except Exception as error:  # protobuf's, or whatever parses has of its own
            raise InvalidArgumentError("the request is not a valid message of its type") from error

    def _caller(self) -> Hashable:
        """Who made the call: the caller that the gate names, else the address of the connection's peer."""
        gate = self._shared.gate
        caller = None if gate is None else gate.rank(self.headers, self.tenant).caller
        return self._peer if caller is None else caller

    async def _unfold(self, message: bytes) -> bytes:
        unfolder = encoding.Unfolder(self._encoding, message, self._most_bytes)
        unfoldings = self._shared.unfoldings
        if not unfoldings.is_waiting(self._peer):  # or many would be half done, and hold what they have made
            whole = unfolder.step()
            if whole is not None:  # it was small
                return whole
            self._stream.keep(unfolder.size)
        return await unfoldings.unfold(self._peer, unfolder, self._stream.keep)

    def __aiter__(self) -> ServerCall:
        """The requests."""
        return self

    async def __anext__(self) -> Any:
        """The next request."""
        request = await self.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return request

    async def write(self, message: Any) -> None:
        """Sends a response; returns once the next one may follow.

        Raises:
            CancelledError: The call is over, and its handler continued though it was cancelled.
        """
        if self.done():
            raise asyncio.CancelledError
        self.write_now(message)
        if not self._stream.ready:
            await self._stream.drained()

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Begins the response, now."""
        self._initial = initial_metadata or ()
        self._open()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Never:
        """Ends the call with a status."""
        if trailing_metadata:
            self.set_trailing_metadata(trailing_metadata)
        self._code, self._details = code, details
        raise grpc.aio.AbortError

    async def abort_with_status(self, status: grpc.Status) -> Never:
        """Ends the call with a status."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sets the metadata with which the response ends."""
        # Encoded here, where a mistake is the handler's, and not where the call must end.
        self._trailing = tuple(trailing_metadata or ())
        self._trailing_block = metadata_block(self._trailing)

    def invocation_metadata(self) -> Any:
        """The caller's metadata."""
        if self._metadata is None:
            self._metadata = read_metadata(self.headers)
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the status with which the call will end."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Sets the status's message."""
        self._details = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Responses are never compressed."""

    def disable_next_message_compression(self) -> None:
        """Responses are never compressed."""

    def peer(self) -> str:
        """The client's address."""
        return self._peer

    def peer_identities(self) -> Iterable[bytes] | None:
        """Nobody: certificates are checked, and not told."""
        return None

    def peer_identity_key(self) -> str | None:
        """None, as there are no identities."""
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Nothing, as there are no identities."""
        return {}

    def time_remaining(self) -> Any:
        """Seconds until the deadline; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())

    def trailing_metadata(self) -> Any:
        """The metadata with which the response ends."""
        return self._trailing

    def code(self) -> grpc.StatusCode:
        """The status so far."""
        return self._code

    def details(self) -> str:
        """The message of the status so far."""
        return self._details

    def add_done_callback(self, callback: Any) -> None:
        """Adds what is called with the call when it is over, also when the client leaves."""
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Whether the client has left before the end."""
        return self._stream.closed and not self._ended

    def done(self) -> bool:
        """Whether it is over."""
        return self._stream.closed or self._ended

    # What servicers here use next to it (PushCall).

    def set_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Sets the metadata with which the response begins, sent in one packet with its first message or its end."""
        self._initial = metadata

    def is_ready(self) -> bool:
        """Whether a response that is written now leaves at once. If not, it is better sent later, together with others."""
        return self._stream.ready

    def write_now(self, message: Any) -> None:
        """Sends a response, without waiting. For those who ask :meth:`is_ready` before."""
        self.write_bytes(self._serialize(message))

    def write_bytes(self, message: bytes) -> None:
        """Sends a serialized response, without waiting."""
        if not self._opened:
            self._open()
        self._stream.write(message)

    async def drained(self) -> None:
        """Returns once :meth:`is_ready`, or once the client has left."""
        if not self._stream.ready:
            await self._stream.drained()

    def end(self, code: grpc.StatusCode | None = None, details: str = "") -> None:
        """Ends the call: with this status, or with the one that was set. Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        self._on_begin = self._on_gone = None
        if code is not None:
            self._code, self._details = code, details
        if self._initial and not self._opened:
            self._open()
        trailers = closing_block(self._code, self._details, self._trailing_block)
        # A response without messages is one block.
        self._stream.finish(trailers if self._opened else opening_block() + trailers)
        self._call_back()

    def fail(self, error: CallError) -> None:
        """Ends the call with an error."""
        code, details, trailing = self._status_of(error)
        if trailing:
            self.set_trailing_metadata(trailing)
        self.end(code, details)

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call at once, though the client may not have taken what was written."""
        self.end(code, details)
        self._stream.reset(ErrorCodes.CANCEL)

    # What the stream tells (StreamReceiver).

    def received(self, message: bytes, compressed: bool) -> None:
        if self._one_request and self._received:
            self._stream.taken(len(message))
            return
        self._received = True
        self._requests.append((message, compressed))
        self._tell()

    def too_large(self, size: int) -> None:
        self._problem = self._too_large(size)
        self._tell()

    def overloaded(self, error: CallError) -> None:
        on_gone = self._on_gone
        self.fail(error)
        self._stream.reset(ErrorCodes.CANCEL)
        if on_gone is not None:
            on_gone()

    def half_closed(self) -> None:
        self._requests_over = True
        self._tell()

    def gone(self) -> None:
        self._requests_over = True
        self._on_begin = None
        if self._on_gone is not None:
            self._on_gone()
        self._call_back()
        self._tell()

    def _too_large(self, size: int) -> CallError:
        return ResourceExhaustedError(f"Received message larger than max ({size} vs. {self._most_bytes})")

    def _tell(self) -> None:
        begin, self._on_begin = self._on_begin, None
        if begin is not None:
            begin()
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._stream.send_headers(opening_block(self._initial))

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the connection's other calls continue
                logger.exception("a call's done callback failed")
