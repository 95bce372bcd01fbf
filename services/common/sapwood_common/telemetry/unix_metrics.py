"""Serves metrics on a Unix socket, which prometheus_client by itself does not."""

from __future__ import annotations

import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sapwood_common.unix_socket import listen_unix, port_of

_BACKLOG = 16


class _Server(ThreadingWSGIServer):
    def get_request(self) -> tuple[Any, Any]:
        connection, _ = self.socket.accept()
        return connection, ("unix", 0)  # handlers look into the client's address, which is empty


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Logs nothing."""


def serve_on_socket(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    """Begins to serve in a thread; returns server and thread, as ``prometheus_client.start_http_server`` does.

    Args:
        registry: What is served.
        host: ``unix:PREFIX``.
        port: 0 takes a free one.

    Raises:
        ConfigError: It cannot be listened on.
    """
    server = _Server((host, port), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listen_unix(host, port, _BACKLOG)
    server.server_name, server.server_port = host, port_of(server.socket)
    server.setup_environ()
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    return server, thread
