"""uvicorn inside the router's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from sapwood_common.errors import ConfigError
from sapwood_common.tls import ServerTls
from sapwood_router.openai.connection import HttpConnection

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_MOST_UNSENT = 128 * 1024
"""Bytes that the kernel takes beyond what is on its way to a client. Left to itself it takes megabytes for one that does not
read, and what stands in them has been generated, and is remembered, for nobody.
"""
_CERTIFICATE_INTERVAL = 1.0


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
        tls: Certificate, key and the clients' CA, taken up anew when the files change; None is plain text.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, tls: ServerTls | None = None) -> None:
        self.host = host
        self._tls = tls
        self._port = port
        self._config = uvicorn.Config(
            app,
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
            ssl_ca_certs=None if tls is None or tls.client_ca is None else str(tls.client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if tls is None or tls.client_ca is None else ssl.CERT_REQUIRED,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            interface="asgi3",
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(self._config)
        self._newest: ssl.SSLContext | None = None
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens and serves. Returns the port.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        listener = _listen(self.host, self._port)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="HTTP server")
        if self._tls is not None:
            self._watcher = asyncio.create_task(self._follow(self._tls), name="HTTP certificate")
        return port

    async def _follow(self, tls: ServerTls) -> None:
        """Has new handshakes use new files.

        The listener keeps its first context, and a context forgets no CA: so each handshake is moved to the newest one.
        """
        version = tls.version()
        while True:
            await asyncio.sleep(_CERTIFICATE_INTERVAL)
            try:
                found = tls.version()
                if found != version and self._config.ssl is not None:
                    self._newest = _context(tls)
                    self._config.ssl.sni_callback = self._move_to_newest
                    version = found
            except (OSError, ssl.SSLError) as error:
                logger.warning("new TLS files are not taken up: %s", error)

    def _move_to_newest(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        assert self._newest is not None
        handshake.context = self._newest

    async def stop(self) -> None:
        """Closes the listener and all connections; a request still running gets a second."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._task is not None:
            self._server.should_exit = True
            await self._task


def _context(tls: ServerTls) -> ssl.SSLContext:
    """As uvicorn makes its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(tls.client_ca)
    return context


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # What is accepted inherits it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} for HTTP: {error.strerror or error}") from error
    return listener
