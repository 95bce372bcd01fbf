"""A count over the last seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

_PARTS = 10
_NONE = [math.nan, 0.0]
"""Stands for the latest part where there is none: no part has its number."""


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
        self._latest = _NONE
        self._total = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Adds to the count, now."""
        number = int(self._clock() / self._part)
        latest = self._latest
        if latest[0] != number:
            self._expire(number)
            latest = self._latest = [number, 0.0]
            self._parts.append(latest)
        latest[1] += amount
        self._total += amount

    def total(self) -> float:
        """The count over the window that ends now."""
        self._expire(int(self._clock() / self._part))
        return self._total

    def clear(self) -> None:
        """Forgets everything."""
        self._parts.clear()
        self._latest = _NONE
        self._total = 0.0

    def _expire(self, number: int) -> None:
        while self._parts and self._parts[0][0] <= number - _PARTS:
            self._total -= self._parts.popleft()[1]
        if not self._parts:
            self._latest = _NONE
            self._total = 0.0  # rounding errors must not add up
