"""Ways from one rank to those on other hosts: TCP connections that begin with a key and the rank's number."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from sapwood_common.errors import ConfigError

KEY_BYTES = 16
_RANK = struct.Struct("!I")
_HELLO_SECONDS = 5.0


def listen(host: str) -> socket.socket:
    """A socket that listens at an address of rank 0's, on a free port.

    Raises:
        ConfigError: It cannot.
    """
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"--rendezvous {host}: cannot listen there: {error}") from error


def connect(address: str, key: bytes, rank: int) -> Connection:
    """A rank's way to rank 0.

    Args:
        address: Where that listens, as HOST:PORT.
        key: What it has told this rank, or its host.
        rank: This rank's number.

    Raises:
        ConfigError: It cannot be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        way = socket.create_connection((host, int(port)), timeout=_HELLO_SECONDS)
        way.sendall(key + _RANK.pack(rank))
    except OSError as error:
        raise ConfigError(f"rank 0 cannot be reached at {address}: {error}") from error
    return _way(way)


def accept(listener: socket.socket, key: bytes, ranks: Sequence[int], seconds: float) -> list[Connection]:
    """Rank 0's ways to others, in their order. Whoever does not begin with the key is left alone.

    Args:
        listener: Where they come.
        key: What they say first.
        ranks: Those others.
        seconds: The time that they have.

    Raises:
        ConfigError: One did not come in time; says which.
    """
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    while missing := [rank for rank in ranks if rank not in found]:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            way, _ = listener.accept()
        except TimeoutError:
            raise ConfigError(f"rank {missing[0]} did not come within {seconds:.0f} s") from None
        rank = _rank_of(way, key)
        if rank in missing:
            found[rank] = way
        else:
            way.close()
    return [_way(found[rank]) for rank in ranks]


def _rank_of(way: socket.socket, key: bytes) -> int:
    """The rank that has begun well; -1: it has not."""
    way.settimeout(_HELLO_SECONDS)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < len(key) + _RANK.size and (part := way.recv(len(key) + _RANK.size - len(said))):
            said += part
    if len(said) < len(key) + _RANK.size or not hmac.compare_digest(said[: len(key)], key):
        return -1
    return int(_RANK.unpack(said[len(key) :])[0])


def _way(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())
