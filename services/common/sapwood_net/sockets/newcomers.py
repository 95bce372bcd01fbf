"""The order in which accepted connections begin: no address keeps the others waiting.

Addresses take turns; an address that was not in the line has the next turn. Where an address has many connections, the newest
goes first: a client that comes behind a thousand does not wait for them all, as it would in a queue.
"""

from __future__ import annotations

import contextlib
import socket
from collections import OrderedDict, deque
from typing import Any

_FAIR = 8
"""Connections of one address beyond which its newest begins first."""
_MAPPED = "::ffff:"
_NETWORK = 8
"""Bytes of an IPv6 address that are one client's network, in which he has any number of addresses."""


def source(address: Any) -> str | bytes:
    """The unit that counts as one address: an IPv4 address, or an IPv6 network; all clients of a Unix socket are one.

    Args:
        address: As ``socket.accept`` tells it.
    """
    host = address[0] if isinstance(address, tuple) else ""
    if ":" in host and not host.startswith(_MAPPED):
        with contextlib.suppress(OSError):
            return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:_NETWORK]
    return str(host)


class Newcomers:
    """Connections that wait to begin.

    Args:
        most: How many may wait; beyond it the oldest of the address with the most goes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._waiting: OrderedDict[str | bytes, deque[socket.socket]] = OrderedDict()
        """Each address's connections, the address whose turn is next first. An address without connections is not in it."""

    def __len__(self) -> int:
        return self._count

    def add(self, connection: socket.socket, address: str | bytes) -> socket.socket | None:
        """Adds one; returns the one that has to go for it, possibly the same."""
        known = self._waiting.get(address)
        if known is None:
            self._waiting[address] = deque((connection,))
            self._waiting.move_to_end(address, last=False)
        else:
            known.append(connection)
        self._count += 1
        if self._count <= self._most:
            return None
        largest = max(self._waiting, key=lambda each: len(self._waiting[each]))
        return self._take(largest, newest=False)

    def pop(self) -> socket.socket:
        """Takes the one whose turn it is; there is one."""
        address, connections = next(iter(self._waiting.items()))
        taken = self._take(address, newest=len(connections) > _FAIR)
        if address in self._waiting:
            self._waiting.move_to_end(address)
        return taken

    def _take(self, address: str | bytes, *, newest: bool) -> socket.socket:
        connections = self._waiting[address]
        taken = connections.pop() if newest else connections.popleft()
        if not connections:
            del self._waiting[address]
        self._count -= 1
        return taken
