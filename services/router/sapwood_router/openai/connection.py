"""uvicorn's HTTP connection with what ASGI has no words for: part of a body written at once, and a call when the client leaves.

Awaiting ASGI's ``send`` for each delta means waking a task for it, and a task of its own to await that the client leaves; both
cost more than the rest of what a delta goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "sapwood.connection"


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

    def write_chunk(self, body: bytes) -> None:
        """Sends more of a chunked body, at once. Its response has been started, and no ``send`` is being awaited."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

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
