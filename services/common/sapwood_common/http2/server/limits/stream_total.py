"""Bounds the calls that all connections have at a time."""

from __future__ import annotations

MOST, MOST_UNKNOWN = 16_384, 1024
"""Calls; those of connections that have to show a key and have not yet. Beyond it each connection may have an equal share, at
least ``LEAST``: early clients do not keep late ones out."""
LEAST = 4


class StreamTotal:
    """The calls of one server, or of a part of its connections. Each takes 2 KB even if it idles, for a few bytes that its client
    sends.

    Args:
        most: How many there may be before shares count.

    Attributes:
        open: Calls that are open.
        connections: Connections that are open.
    """

    __slots__ = ("_most", "connections", "open")

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.open = 0
        self.connections = 0

    def allows(self, own: int) -> bool:
        """Whether a connection that has ``own`` calls may have one more."""
        return self.open < self._most or own < max(LEAST, self._most // max(1, self.connections))
