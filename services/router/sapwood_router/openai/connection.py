"""uvicorn's HTTP connection with what ASGI has no words for: part of a body written at once, and a call when the client leaves.

Awaiting ASGI's ``send`` for each delta means waking a task for it, and a task of its own to await that the client leaves; both
cost more than the rest of what a delta goes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sapwood_common.errors import RequestCancelledError
from sapwood_common.http2.turnstile import Rank, Turnstile
from sapwood_router.openai.write_batch import WriteBatch

_EXTENSION = "sapwood.connection"
_CHUNKED = [(b"transfer-encoding", b"chunked")]
_MOST_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, or of the trailers after its body; the parser itself keeps as many as come."""
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

_HEAD_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

Headers = Sequence[tuple[bytes, bytes]]


class HttpConnection(HttpToolsProtocol):
    """Applications find it with :func:`connection_of`.

    Attributes:
        head_seconds: A client has for the line and headers of a request, from its first byte on. The parser would wait for ever.

    Args:
        writes: Takes what is written past ``send``, for all connections.
        turnstile: Says when requests begin, on all connections.
        rank: Which of those that have to wait begin first, by their headers.
        args, kwargs: uvicorn's.
    """

    head_seconds = 60.0

    def __init__(
        self, writes: WriteBatch, turnstile: Turnstile, rank: Callable[[Headers], Rank], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._turnstile = turnstile
        self._rank = rank
        self._writes = writes
        self._watchers: list[Callable[[], None]] = []
        self._head_bytes = 0
        """That have come since the last head, piece of a body or end of a request was whole."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """See asyncio.Protocol."""
        super().connection_made(transport)
        # One without a request is an idle one.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()
        elif self._head_bytes and self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._head_timer = self.loop.call_later(self.head_seconds, self._give_head_up)

    def on_headers_complete(self) -> None:
        """See HttpToolsProtocol."""
        self._head_bytes = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See HttpToolsProtocol."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See HttpToolsProtocol."""
        self._head_bytes = 0
        super().on_message_complete()

    def on_message_begin(self) -> None:
        """See HttpToolsProtocol."""
        super().on_message_begin()
        cast(Scope, self.scope)["extensions"] = {_EXTENSION: self}

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """See HttpToolsProtocol: when it is the request's turn."""
        start = super()._start_asgi_task
        if self._turnstile.busy:
            self._turnstile.enter(lambda: start(cycle, app), *self._rank(cast(Scope, cycle.scope)["headers"]))
        else:
            self._turnstile.enter(lambda: start(cycle, app))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which would keep this for as long, if the client reset the connection
        self._head_came()
        for watcher in tuple(self._watchers):
            watcher()
        self._watchers.clear()

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_head_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.write(_HEAD_TIMEOUT)
            self.transport.close()

    def writable(self) -> bool:
        """Whether the client is there and reads: then :meth:`write_chunk` may be called."""
        return not self.flow.write_paused and not self.transport.is_closing()

    async def drained(self) -> None:
        """Returns once the client has read enough for more.

        Raises:
            RequestCancelledError: It has left.
        """
        await self.flow.drain()
        if self.transport.is_closing():
            raise RequestCancelledError("the client left")

    async def send_first(
        self, scope: Scope, send: Send, status: int, headers: Headers, body: bytes, *, chunked: bool, last: bool
    ) -> None:
        """Sends a response's head with all of its body, or with the first of it, in one write.

        ``send`` makes one of each, and examines every header.

        Args:
            scope, send: The request's, as ASGI gives them.
            status: HTTP status.
            headers: Well formed, and none of those that say how long the body is.
            body: What there is of it, at least a byte.
            chunked: Whether its length is not known; else this is all of it.
            last: Whether nothing follows.
        """
        cycle = self.cycle
        length = [] if chunked else [(b"content-length", b"%d" % len(body))]
        if cycle is None or cycle.scope is not scope or not self.writable() or scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
            await send({"type": "http.response.body", "body": body, "more_body": not last})
            return
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers, *(length or _CHUNKED)):
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        parts.append(b"%x\r\n%b\r\n" % (len(body), body) if chunked else body)
        if chunked and last:
            parts.append(b"0\r\n\r\n")
        cycle.response_started, cycle.waiting_for_100_continue, cycle.chunked_encoding = True, False, chunked
        self.transport.write(b"".join(parts))
        if last:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                self.transport.close()
            cycle.on_response()

    def write_chunk(self, body: bytes) -> None:
        """Sends more of a chunked body, in this turn of the loop, before any task that is woken from now on goes on. Its response
        has been started, and no ``send`` is being awaited.
        """
        self._writes.add(self.transport, b"%x\r\n%b\r\n" % (len(body), body))

    def flush(self) -> None:
        """Writes what was added in this turn of the loop: what is sent another way comes after it."""
        self._writes.flush()

    def end_chunks(self, scope: Scope, body: bytes) -> bool:
        """Sends the last of a chunked body as :meth:`write_chunk` does, which ends the response; or says that ``send`` has to."""
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or not (cycle.keep_alive and cycle.chunked_encoding):
            return False
        if not self.writable():
            return False
        self._writes.add(self.transport, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True

    def number_writer(self, before: bytes, after: bytes) -> Callable[[int], bool]:
        """Makes what does :meth:`write_chunk` with ``before``, a number and ``after``, if the client is there and
        reads, and says whether it was. It is called for each token of each stream.
        """
        flow, transport, add = self.flow, self.transport, self._writes.add
        fixed = len(before) + len(after)
        heads: dict[int, bytes] = {}
        """By the number's digits."""
        tail = after + b"\r\n"

        def send(number: int) -> bool:
            if flow.write_paused or transport.is_closing():
                return False
            digits = b"%d" % number
            size = len(digits)
            if size not in heads:
                heads[size] = b"%x\r\n%b" % (fixed + size, before)
            add(transport, heads[size] + digits + tail)
            return True

        return send

    def abort(self) -> None:
        """Closes at once, whatever the client has not read."""
        self.transport.abort()

    def take_body(self, scope: Scope, limit: int) -> bytes | None:
        """The body of a request, if all of it has come and it is no larger than ``limit`` bytes; else it is to be received."""
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or cycle.more_body or len(cycle.body) > limit:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def watch(self, watcher: Callable[[], None]) -> None:
        """Calls ``watcher`` when the client leaves, until :meth:`unwatch`. Only after the request's body was read."""
        self.flow.resume_reading()  # or nobody would see it leave
        if self.transport.is_closing():
            watcher()
        else:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """See :meth:`watch`."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)


def connection_of(scope: Scope) -> HttpConnection:
    """The connection of an ASGI request."""
    connection: HttpConnection = scope["extensions"][_EXTENSION]
    return connection
