"""A request as its handler sees it: what was asked, and the ways to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from sapwood_common.errors import RequestCancelledError
from sapwood_net.pacing.write_batch import WriteBatch
from sapwood_router.edges.http1.body import Body
from sapwood_router.edges.http1.head import Head, Headers
from sapwood_router.edges.http1.response_head import ResponseHeads

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS = frozenset({204, 304})


class RequestConnection(Protocol):
    """What a request needs of its connection."""

    heads: ResponseHeads
    writes: WriteBatch

    @property
    def transport(self) -> asyncio.Transport:
        """Takes what is written."""
        ...

    @property
    def write_paused(self) -> bool:
        """Whether the client does not read what was written."""
        ...

    async def drained(self) -> None:
        """Returns once the client has read enough for more, or has left."""
        ...

    def stays_open(self) -> bool:
        """Whether the connection is for further requests after the one being answered. To be asked once an answer."""
        ...

    def expect_body(self) -> None:
        """Somebody waits for the request's body."""
        ...

    def answered(self) -> None:
        """The request's answer has been written to its end."""
        ...

    def abort(self) -> None:
        """Closes at once, whatever the client has not read."""
        ...


class Request:
    """One request being answered. Answer it with :meth:`respond`; nothing else may be sent before.

    Args:
        connection: Its connection.
        head: The request line and headers.
        body: Its body.

    Attributes:
        started: Whether the answer has begun.
        keeps_open: Whether the client may send another request after it, as the answer's head says.
        over: Whether nothing more reaches the client: the answer is complete, or the client has left.
    """

    resumes = ""
    """The response that is made again by it: of what clients send none."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_transport",
        "_watchers",
        "body",
        "head",
        "keeps_open",
        "left",
        "over",
        "started",
    )

    def __init__(self, connection: RequestConnection, head: Head, body: Body) -> None:
        self.head = head
        self.body = body
        self.started = False
        self.over = False
        self.left = False
        """Whether the client has left."""
        self._connection = connection
        self._transport = connection.transport
        self._chunked = False
        self.keeps_open = True
        self._watchers: list[Callable[[], None]] = []

    def take_body(self, limit: int) -> bytes | None:
        """The body, if all of it has come and it is no larger than ``limit`` bytes; else it is to be received."""
        return self.body.take(limit)

    async def receive_body(self, limit: int, look_at: Callable[[Body], Awaitable[None]] | None = None) -> bytes:
        """The body, which may be ``limit`` bytes; waits and raises as :meth:`Body.receive`."""
        if self.left:
            raise RequestCancelledError("the client left")
        return await self.body.receive(limit, self._want_body, look_at)

    async def read_body(self) -> bytes:
        """The next piece of the body, empty at its end; raises as :meth:`Body.read`."""
        if self.left:
            raise RequestCancelledError("the client left")
        return await self.body.read(self._want_body)

    def writable(self) -> bool:
        """Whether the client is there and reads, or has all of its answer: then :meth:`write_chunk` may be called."""
        if self.over:
            return not self.left
        return not (self._connection.write_paused or self._transport.is_closing())

    async def drained(self) -> None:
        """Returns once the client has read enough for more.

        Raises:
            RequestCancelledError: It has left.
        """
        await self._connection.drained()
        if self.left or self._transport.is_closing():
            raise RequestCancelledError("the client left")

    async def respond(
        self, status: int, headers: Headers, body: bytes = b"", *, chunked: bool = False, last: bool = True
    ) -> None:
        """Sends a response's head with all of its body, or with the first of it, in one write. Waits for the client to read.

        Args:
            status: HTTP status.
            headers: Well formed, and none of those that say how long the body is or what becomes of the connection.
            body: What there is of it.
            chunked: Whether its length is not known; else this is all of it.
            last: Whether nothing follows.
        """
        self.started = True
        connection = self._connection
        if connection.write_paused:
            await connection.drained()
        if self.over:
            return
        bodiless = self.head.method == "HEAD" or status in _BODILESS
        framing = b"" if chunked or status in _BODILESS else b"content-length: %d\r\n" % len(body)
        self._chunked = chunked and self.head.takes_chunks
        self.keeps_open = connection.stays_open() and self._chunked == chunked
        if self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        if not self.keeps_open:
            framing += b"connection: close\r\n"
        elif not self.head.takes_chunks:
            framing += b"connection: keep-alive\r\n"
        data = connection.heads.make(status, headers, framing)
        if not bodiless:
            data += self._frame(body, last) if self._chunked else body
        if last or bodiless:
            connection.writes.write(self._transport, data)
            self._end()
        else:
            connection.writes.add(self._transport, data)

    async def send(self, body: bytes, *, last: bool) -> None:
        """Sends more of a body whose length was not known, once the client has read enough; ``last`` ends the response."""
        if self._connection.write_paused:
            await self._connection.drained()
        if not self.over:
            self._write(body, last)

    def write_chunk(self, body: bytes) -> None:
        """Sends more of such a body in this turn of the loop, before tasks that are woken later. Only while :meth:`writable`."""
        if self.over:
            return
        connection = self._connection
        connection.writes.add(self._transport, b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Calls ``watcher`` when the client leaves, until :meth:`unwatch`."""
        if self.left:
            watcher()
        else:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Undoes :meth:`watch`; does nothing if the client has left."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def abort(self) -> None:
        """Closes the connection at once, whatever the client has not read."""
        self._connection.abort()

    def lose_client(self) -> None:
        """The client has left."""
        self.left = self.over = True
        self.body.fail(RequestCancelledError("the client left"))
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def _want_body(self) -> None:
        connection = self._connection
        if self.head.expects_continue and not self.body.size:
            connection.writes.add(self._transport, _CONTINUE)
        connection.expect_body()

    def _frame(self, body: bytes, last: bool) -> bytes:
        if not self._chunked:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if last else chunk

    def _write(self, body: bytes, last: bool) -> None:
        connection = self._connection
        connection.writes.add(self._transport, self._frame(body, last))
        if last:
            self._end()

    def _end(self) -> None:
        self.over = True
        self._watchers.clear()
        self._connection.answered()
