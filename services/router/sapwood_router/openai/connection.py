"""uvicorn's HTTP connection with what ASGI has no words for: part of a body written at once, and a call when the client leaves.

Awaiting ASGI's ``send`` for each delta means waking a task for it, and a task of its own to await that the client leaves; both
cost more than the rest of what a delta goes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "sapwood.connection"


class _Gathered:
    """Stands for a transport while a response is put together."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._closed = False

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def close(self) -> None:
        self._closed = True

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def flush(self) -> None:
        self._transport.write(b"".join(self._parts))
        if self._closed:
            self._transport.close()


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

    @property
    def writable(self) -> bool:
        """Whether the client is there and reads: then :meth:`write_chunk` may be called."""
        return not self.flow.write_paused and not self.transport.is_closing()

    async def send_together(self, scope: Scope, send: Send, *messages: Message) -> None:
        """Sends head and body of a response in one write, where ``send`` makes one of each."""
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or not self.writable:
            for message in messages:
                await send(message)
            return
        gathered = _Gathered(self.transport)
        cycle.transport = cast(asyncio.Transport, gathered)
        try:
            for message in messages:
                await send(message)
        finally:
            cycle.transport = self.transport
            gathered.flush()

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
