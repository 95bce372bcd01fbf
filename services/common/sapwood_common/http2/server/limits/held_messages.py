"""Bounds the memory of one connection's messages: those in part, those not read yet, and large ones whose calls run."""

from __future__ import annotations

from typing import Protocol

from sapwood_common.errors import ResourceExhaustedError, SapwoodError
from sapwood_common.pacing.body_memory import BodyMemory


class HeavyStream(Protocol):
    """A stream that holds much."""

    def overload(self, error: SapwoodError) -> None:
        """Drops what it holds; its call ends with the error."""
        ...


class Holder(Protocol):
    """The connection whose messages are held."""

    def count_overloaded(self) -> None:
        """A call was ended because too many bytes were held."""
        ...


class HeldMessages:
    """The messages of one connection. Its largest call ends where it holds too much, or where all do and it holds the most.

    Args:
        memory: The memory of all connections.
        most_bytes: The most bytes that this one may hold.
        holder: Told of each call that ends for it.

    Attributes:
        total: Bytes that are held now.
        most: The most bytes that this one may hold.
    """

    def __init__(self, memory: BodyMemory, most_bytes: int, holder: Holder) -> None:
        self.total = 0
        self.most = most_bytes
        self._memory = memory
        self._holder = holder
        self._sizes: dict[HeavyStream, int] = {}

    def set(self, stream: HeavyStream, size: int) -> None:
        """Notes that a stream holds ``size`` bytes from now on. It, or another one, may be overloaded by that."""
        before = self._sizes.pop(stream, 0)
        if size:
            self._sizes[stream] = size
        self.total += size - before
        if size < before:
            self._memory.shrink(self, before - size)
        elif size > before:
            self._memory.grow(self, size - before)
            while self.total > self.most:
                largest, freed = self._forget_largest()
                self._memory.shrink(self, freed)
                largest.overload(
                    ResourceExhaustedError("the messages of this connection hold more than is allowed", retry_after=1.0)
                )
                self._holder.count_overloaded()

    def fail(self, error: SapwoodError) -> None:
        """Ends the largest call: all connections hold too much, and this one, which the memory has released, the most."""
        largest, _ = self._forget_largest()
        if self.total:
            self._memory.grow(self, self.total)
        largest.overload(ResourceExhaustedError(error.message, retry_after=error.retry_after))
        self._holder.count_overloaded()

    def _forget_largest(self) -> tuple[HeavyStream, int]:
        largest = max(self._sizes, key=self._sizes.__getitem__)
        size = self._sizes.pop(largest)
        self.total -= size
        return largest, size
