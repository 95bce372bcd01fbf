"""Signals between processes that share memory: ``signals.c``."""

from __future__ import annotations

from sapwood_kernels.native.library import NativeLibrary

SIGNAL_BYTES = 64
"""Bytes of a process's signal: a cache line."""


class Signals:
    """A count for each of several processes, in memory that they share, which is zero at first.

    A process that has waited for a count sees all that was written before it.

    Args:
        library: The compiled library.
        address: Of ``size * SIGNAL_BYTES`` bytes, aligned to as many as one signal has; they have to outlive this object.
        rank: This process, from 0.
        size: How many processes there are.
    """

    def __init__(self, library: NativeLibrary, address: int, rank: int, size: int) -> None:
        self._post, self._wait = library.post, library.wait
        self._address, self._size = address, size
        self._own = address + rank * SIGNAL_BYTES
        self._count = 0

    def count_up(self) -> None:
        """Says that this process has come one further."""
        self._count += 1
        self._post(self._own, self._count)

    def wait(self, seconds: float) -> int | None:
        """Waits until all have come as far as this process; lets other threads run.

        Returns:
            None, or after ``seconds`` a process that has not.
        """
        late: int = self._wait(self._address, self._size, self._count, int(seconds * 1e9))
        return None if late < 0 else late
