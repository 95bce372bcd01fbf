"""How much the requests that clients send hold together, until they are done with."""

from __future__ import annotations

from typing import Protocol

from sapwood_common.errors import SapwoodError, UnavailableError


class HeldBody(Protocol):
    """What is given up if there is too much of it."""

    def fail(self, error: SapwoodError) -> None:
        """Gives it up, and says why."""
        ...


class BodyMemory:
    """Of one server. Beyond its bound the largest body is given up: whoever sends little is never that.

    Args:
        most_bytes: Of all bodies.
    """

    def __init__(self, most_bytes: int) -> None:
        self.held = 0
        """Bytes, now."""
        self.most = most_bytes
        self._sizes: dict[HeldBody, int] = {}

    def grow(self, body: HeldBody, count: int) -> None:
        """``count`` more bytes of a body came; one, possibly this, may be given up and released."""
        self._sizes[body] = self._sizes.get(body, 0) + count
        self.held += count
        while self.held > self.most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.release(largest)
            largest.fail(
                UnavailableError("more is held of unfinished bodies than fits; this was the largest", retry_after=1.0)
            )

    def shrink(self, body: HeldBody, count: int) -> None:
        """``count`` bytes of a body are held no more."""
        self._sizes[body] -= count
        self.held -= count
        if not self._sizes[body]:
            del self._sizes[body]

    def release(self, body: HeldBody) -> None:
        """Nothing is held of it any more; it may have been released before."""
        self.held -= self._sizes.pop(body, 0)
