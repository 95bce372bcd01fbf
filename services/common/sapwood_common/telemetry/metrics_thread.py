"""Serves metrics in threads, a few at a time: prometheus_client's own server has one for each client, however long it stays, and
no Unix sockets.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sapwood_common.host_names import is_own_machine, listens_on_loopback
from sapwood_net.pacing.rate import Rate
from sapwood_net.sockets.unix_socket import listen_unix, port_of

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

_BACKLOG = 16
MOST_AT_ONCE = 32
"""Clients; who comes beyond them is closed."""
SILENCE = 10.0
"""Seconds that a client may be silent."""
MOST_SECONDS = 20.0
"""Seconds that a client may take in all: those that send a byte now and then would keep others out."""
A_MINUTE = 600
"""Clients that are served, a hundred of them at once; further ones wait. To write the metrics takes milliseconds of the
interpreter that the service's event loop needs.
"""


class _Server(ThreadingWSGIServer):
    request_queue_size = _BACKLOG

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._rate = Rate(A_MINUTE, time.monotonic)
        self._until: dict[Any, float] = {}
        """When each client has had its time."""

    def service_actions(self) -> None:
        """Ends clients that have had their time. Called about twice a second."""
        for request, until in tuple(self._until.items()):
            if time.monotonic() >= until:
                with contextlib.suppress(OSError):  # it has left
                    request.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        time.sleep(self._rate.wait())
        self._rate.take(1)
        if self._places.acquire(blocking=False):
            self._until[request] = time.monotonic() + MOST_SECONDS
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._until.pop(request, None)
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client of the metrics was not answered", exc_info=True)


class _UnixServer(_Server):
    def get_request(self) -> tuple[Any, Any]:
        connection, _ = self.socket.accept()
        return connection, ("unix", 0)  # handlers look into the client's address, which is empty


class _Handler(WSGIRequestHandler):
    timeout = SILENCE

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Logs nothing."""


def serve_on_port(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    """Begins to serve in a thread; returns server and thread.

    Args:
        registry: The metrics to serve.
        host: Address or name.
        port: 0 takes a free one.

    Raises:
        OSError: It cannot be listened on.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda item: item[0] != socket.AF_INET)
    server = _Server(address[:2], _Handler, bind_and_activate=False)
    server.socket.close()
    server.address_family = family
    server.socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.server_bind()
        server.server_activate()
    except OSError:
        server.server_close()
        raise
    return server, _start(
        server, _named_here(make_wsgi_app(registry)) if listens_on_loopback(host) else make_wsgi_app(registry)
    )


def serve_on_socket(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    """The same on a Unix socket.

    Args:
        registry: The metrics to serve.
        host: ``unix:PREFIX``.
        port: 0 takes a free one.

    Raises:
        ConfigError: It cannot be listened on.
    """
    server = _UnixServer((host, port), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listen_unix(host, port, _BACKLOG)
    server.server_name, server.server_port = host, port_of(server.socket)
    server.setup_environ()
    return server, _start(server, make_wsgi_app(registry))


def _named_here(app: WSGIApplication) -> WSGIApplication:
    """An app that refuses requests from web pages whose own name points to this machine; no other client uses such a name."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if is_own_machine(environ.get("HTTP_HOST") or "localhost"):
            return app(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"use an IP address or localhost\n"]

    return answer


def _start(server: WSGIServer, app: WSGIApplication) -> threading.Thread:
    server.set_app(app)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    return thread
