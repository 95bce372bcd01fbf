"""Bounds the bytes that the requests of all clients hold together until they are done with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sapwood_net.errors import CallError, UnavailableError


class HeldBody(Protocol):
    """A body that can be given up where all together hold too much."""

    def fail(self, error: CallError) -> None:
        """Gives the body up; ``error`` says why."""
        ...


CONNECTION_BYTES = 32 * 1024
"""A connection's own memory, over TLS, with the beginning of its client's request."""


class BodyMemory:
    """The memory of one server. Beyond its bound the largest body is given up, which is never that of a client that sends little.

    Args:
        most_bytes: The most bytes that all bodies may hold.
        freed: Called with the number of bytes that are held no more.
    """

    def __init__(self, most_bytes: int, freed: Callable[[int], None] = lambda _: None) -> None:
        self.held = 0
        """Bytes that are held now."""
        self.most = most_bytes
        self._freed = freed
        self._sizes: dict[HeldBody, int] = {}

    def grow(self, body: HeldBody, count: int) -> None:
        """Adds ``count`` bytes to a body; the largest body, possibly this one, may be given up and released."""
        self._sizes[body] = self._sizes.get(body, 0) + count
        self.held += count
        while self.held > self.most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.release(largest)
            largest.fail(
                UnavailableError("more is held of unfinished bodies than fits; this was the largest", retry_after=1.0)
            )

    def shrink(self, body: HeldBody, count: int) -> None:
        """Takes ``count`` bytes from a body, which are held no more."""
        self._sizes[body] -= count
        self.held -= count
        self._freed(count)
        if not self._sizes[body]:
            del self._sizes[body]

    def release(self, body: HeldBody) -> None:
        """Forgets a body that holds nothing any more. Does nothing for one that was released before."""
        count = self._sizes.pop(body, 0)
        self.held -= count
        self._freed(count)

    def lost_connection(self) -> None:
        """Notes that what a connection took itself, which is not counted, is free."""
        self._freed(CONNECTION_BYTES)
