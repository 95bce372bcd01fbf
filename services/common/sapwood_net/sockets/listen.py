"""Sockets to listen on."""

from __future__ import annotations

import errno
import socket

from sapwood_net.errors import ConfigError
from sapwood_net.sockets.unix_socket import is_unix, listen_unix

BACKLOG = 2048
"""Connections that may wait to be accepted."""
_MOST_UNSENT = 128 * 1024
"""Bytes that the kernel buffers beyond what is on its way to a client. By default it buffers megabytes for a client that does not
read: tokens that were generated for nobody.
"""


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket, for an event loop.

    Args:
        host: Address or name, or ``unix:PREFIX``. A name stands for its first IPv4 address, or its first if it has no such.
        port: 0 takes a free one.
        reuse_port: Whether other processes listen on it, too.

    Raises:
        ConfigError: It cannot be listened on.
    """
    if is_unix(host):
        if reuse_port:
            raise ConfigError(f"{host}:{port} is a Unix socket, on which one process listens")
        listener = listen_unix(host, port, BACKLOG)
        listener.setblocking(False)
        return listener
    try:
        found = socket.getaddrinfo(
            host.removeprefix("[").removesuffix("]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = min(found, key=lambda item: item[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Accepted connections inherit the options.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)
            # The kernel closes connections of clients that have vanished, after about two minutes.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {why_not(error, host)}") from error
    return listener


def why_not(error: OSError, host: str) -> str:
    """Explains the error of a socket that should listen on ``host``."""
    if is_foreign(error):
        alone = ": an address stands there without scheme and port" if "/" in host or host.count(":") == 1 else ""
        return f"{host} is no address of this machine{alone}"
    if error.errno == errno.EADDRINUSE:
        return "another process listens there"
    return error.strerror or str(error)


def is_foreign(error: OSError) -> bool:
    """Whether the address, and not the port, is what cannot be listened on."""
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
