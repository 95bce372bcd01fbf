"""uvicorn's HTTP connection with what ASGI has no words for: part of a body written at once, and a call when the client leaves.

Awaiting ASGI's ``send`` for each delta means waking a task for it, and a task of its own to await that the client leaves; both
cost more than the rest of what a delta goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_EXTENSION = "sapwood.connection"
_CHUNKED = [(b"transfer-encoding", b"chunked")]

Headers = Sequence[tuple[bytes, bytes]]


class HttpConnection(HttpToolsProtocol):
    """Applications find it with :func:`connection_of`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watchers: list[Callable[[], None]] = []

    def on_message_begin(self) -> None:
        """See HttpToolsProtocol."""
        super().on_message_begin()
        cast(Scope, self.scope)["extensions"] = {_EXTENSION: self}

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        for watcher in tuple(self._watchers):
            watcher()
        self._watchers.clear()

    def writable(self) -> bool:
        """Whether the client is there and reads: then :meth:`write_chunk` may be called."""
        return not self.flow.write_paused and not self.transport.is_closing()

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
        """Sends more of a chunked body, at once. Its response has been started, and no ``send`` is being awaited."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

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
