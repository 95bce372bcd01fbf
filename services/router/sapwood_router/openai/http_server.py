"""uvicorn inside the router's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from sapwood_common.http2.turnstile import Rank, Turnstile
from sapwood_common.listen import listen
from sapwood_common.tls import ServerContext, ServerTls
from sapwood_router.openai.connection import Headers, HttpConnection
from sapwood_router.openai.write_batch import WriteBatch

_KEEP_ALIVE = 620
"""Seconds that an idle connection stays open: longer than those in front keep it (AWS's load balancers 60, Google's 600, Go's
client 90). Whoever closes first loses the request that the other is just sending."""

_ACCEPTS = 8
"""Connections accepted in a turn of the event loop. uvloop accepts one a turn from each socket: with one, those who come on new
connections wait seconds while a flood of others does, and the router is half idle.
"""


class _Server(uvicorn.Server):
    """Leaves SIGTERM and SIGINT to the router, which drains gRPC and HTTP together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """Serves an ASGI application on one port.

    Args:
        app: The application.
        host: Address to listen on.
        port: 0 takes a free one.
        rank: Which of the requests that come at once begin first, by their headers.
        tls: Certificate, key and the clients' CA, taken up anew when the files change; None is plain text.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, rank: Callable[[Headers], Rank], tls: ServerTls | None = None
    ) -> None:
        self.host = host
        self._tls = None if tls is None else ServerContext(tls)
        self._port = port
        self._config = uvicorn.Config(
            app,
            # The class is only ever called.
            http=cast("type[asyncio.Protocol]", partial(HttpConnection, WriteBatch(), Turnstile(), rank)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            interface="asgi3",
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=_KEEP_ALIVE,
        )
        self._server = _Server(self._config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens and serves. Returns the port.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        listener = listen(self.host, self._port)
        port: int = listener.getsockname()[1]
        self._config.load()
        self._config.ssl = None if self._tls is None else self._tls.context
        sockets = [listener, *(listener.dup() for _ in range(_ACCEPTS - 1))]
        self._task = asyncio.create_task(self._server.serve(sockets=sockets), name="HTTP server")
        return port

    async def stop(self) -> None:
        """Closes the listener and all connections; a request still running gets a second."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
