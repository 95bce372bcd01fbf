"""What the messages of one connection hold in memory: in part, or whole and not read yet, or large and at work."""

from __future__ import annotations

from typing import Protocol

from sapwood_common.errors import ResourceExhaustedError, SapwoodError
from sapwood_common.pacing.body_memory import BodyMemory


class HeavyStream(Protocol):
    """Holds much."""

    def overload(self, error: SapwoodError) -> None:
        """Is to hold nothing any more: its call ends with the error."""
        ...


class HeldMessages:
    """Of one connection. Beyond what it may hold, or more than fits being held by all and most by it, its largest call ends.

    Args:
        memory: Of all connections.
        most_bytes: That this one may hold.
    """

    def __init__(self, memory: BodyMemory, most_bytes: int) -> None:
        self.total = 0
        """Bytes."""
        self._memory = memory
        self._most = most_bytes
        self._sizes: dict[HeavyStream, int] = {}

    def set(self, stream: HeavyStream, size: int) -> None:
        """A stream holds so many bytes from now on; it, or another one, may be told that it is too much."""
        before = self._sizes.pop(stream, 0)
        if size:
            self._sizes[stream] = size
        self.total += size - before
        if size < before:
            self._memory.shrink(self, before - size)
        elif size > before:
            self._memory.grow(self, size - before)
            while self.total > self._most:
                largest, freed = self._forget_largest()
                self._memory.shrink(self, freed)
                largest.overload(
                    ResourceExhaustedError("the messages of this connection hold more than is allowed", retry_after=1.0)
                )

    def fail(self, error: SapwoodError) -> None:
        """All connections hold too much, and none more than this, of which nothing is counted any more."""
        largest, _ = self._forget_largest()
        if self.total:
            self._memory.grow(self, self.total)
        largest.overload(ResourceExhaustedError(error.message, retry_after=error.retry_after))

    def _forget_largest(self) -> tuple[HeavyStream, int]:
        largest = max(self._sizes, key=self._sizes.__getitem__)
        size = self._sizes.pop(largest)
        self.total -= size
        return largest, size
