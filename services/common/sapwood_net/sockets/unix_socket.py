"""Unix sockets in the place of ports: on the host ``unix:PREFIX`` port N is the socket ``PREFIX:N``.

``host:port`` is then one string, and gRPC's clients take it for an address.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

from sapwood_net.errors import ConfigError

_SCHEME = "unix:"
_MOST_PORT = 65535
_TRIES = 100


def is_unix(host: str) -> bool:
    """Whether this host stands for Unix sockets."""
    return host.startswith(_SCHEME)


def listen_unix(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket. One that a process of the same number left behind is replaced.

    Args:
        host: ``unix:PREFIX``.
        port: 0 takes a free one.
        backlog: Connections that may wait to be accepted.

    Raises:
        ConfigError: It cannot be listened on.
    """
    prefix = host.removeprefix(_SCHEME)
    try:
        for _ in range(_TRIES):
            path = f"{prefix}:{port or random.randint(1, _MOST_PORT)}"
            if port and _is_left_behind(path):
                with contextlib.suppress(FileNotFoundError):
                    Path(path).unlink()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(path)
                listener.listen(backlog)
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE or port:
                    raise
            else:
                return listener
    except OSError as error:  # a path that is too long has no strerror
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    raise ConfigError(f"cannot listen on {host}:{port}: no free number was found in {_TRIES} tries")


def port_of(listener: socket.socket) -> int:
    """The number of a listening socket's port, whichever kind it is."""
    name = listener.getsockname()
    return int(name.rpartition(":")[2] if isinstance(name, str) else name[1])


def _is_left_behind(path: str) -> bool:
    """Whether no process listens on a socket any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:  # there is none, or its listener is busy
            return False
    return False
