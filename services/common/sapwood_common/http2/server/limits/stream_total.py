"""Bounds the calls that all connections have at a time."""

from __future__ import annotations

MOST = 16_384
"""Calls. Beyond it each connection may have an equal share, at least ``LEAST``: early clients do not keep late ones out."""
LEAST = 4


class StreamTotal:
    """The calls of one server. Each takes 2 KB even if it idles, for a few bytes that its client sends.

    Attributes:
        open: Calls that are open.
        connections: Connections that are open.
    """

    __slots__ = ("connections", "open")

    def __init__(self) -> None:
        self.open = 0
        self.connections = 0

    def allows(self, own: int) -> bool:
        """Whether a connection that has ``own`` calls may have one more."""
        return self.open < MOST or own < max(LEAST, MOST // max(1, self.connections))
