"""A count over the last seconds."""

from __future__ import annotations

import math
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
        self._parts: deque[tuple[int, float]] = deque()
        """Numbers and amounts of the parts that are over."""
        self._passed = 0.0
        """The sum of those."""
        self._current = 0.0
        self._number = 0
        """The current part's."""
        self._ends = -math.inf
        """When it is over."""

    def add(self, amount: float = 1.0) -> None:
        """Adds to the count, now."""
        if self._clock() >= self._ends:
            self._begin_part()
        self._current += amount

    def total(self) -> float:
        """The count over the window that ends now."""
        if self._clock() >= self._ends:
            self._begin_part()
        return self._passed + self._current

    def clear(self) -> None:
        """Forgets everything."""
        self._parts.clear()
        self._passed = self._current = 0.0

    def _begin_part(self) -> None:
        if self._current:
            self._parts.append((self._number, self._current))
            self._passed += self._current
            self._current = 0.0
        self._number = int(self._clock() / self._part)
        self._ends = (self._number + 1) * self._part
        while self._parts and self._parts[0][0] <= self._number - _PARTS:
            self._passed -= self._parts.popleft()[1]
        if not self._parts:
            self._passed = 0.0  # rounding errors must not add up
