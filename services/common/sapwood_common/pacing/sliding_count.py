"""A count over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_PARTS = 10


class SlidingCount:
    """How much was added during the last ``seconds``, precise to a tenth of them. O(1) time and memory.

    Args:
        seconds: Length of the window.
        clock: Seconds, monotonic.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._part = seconds / _PARTS
        self._clock = clock
        self._parts: deque[list[float]] = deque()
        self._total = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Adds to the count, now."""
        number = self._now()
        if not self._parts or self._parts[-1][0] != number:
            self._expire(number)
            self._parts.append([number, 0.0])
        self._parts[-1][1] += amount
        self._total += amount

    def total(self) -> float:
        """The count over the window that ends now."""
        self._expire(self._now())
        return self._total

    def clear(self) -> None:
        """Forgets everything."""
        self._parts.clear()
        self._total = 0.0

    def _now(self) -> int:
        return int(self._clock() / self._part)

    def _expire(self, number: int) -> None:
        while self._parts and self._parts[0][0] <= number - _PARTS:
            self._total -= self._parts.popleft()[1]
        if not self._parts:
            self._total = 0.0  # rounding errors must not add up
