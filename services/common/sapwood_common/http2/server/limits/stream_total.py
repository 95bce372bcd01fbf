"""How many calls all connections have at a time."""

from __future__ import annotations

MOST = 16_384
"""Beyond it each connection may have an equal part, and at least ``LEAST``: who came first takes nobody's place."""
LEAST = 4


class StreamTotal:
    """Of one server: 2 KB a call that idles, for a few bytes that its client sends.

    Attributes:
        open: Calls.
        connections: Connections.
    """

    __slots__ = ("connections", "open")

    def __init__(self) -> None:
        self.open = 0
        self.connections = 0

    def allows(self, own: int) -> bool:
        """Whether a connection that has ``own`` calls may have one more."""
        return self.open < MOST or own < max(LEAST, MOST // max(1, self.connections))
