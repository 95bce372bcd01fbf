"""When waiting and running requests must end: a heap, with entries of ended requests dropped as they come up.

O(log n) for each request. Bound: when entries of ended requests outnumber the others, the heap is built anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Container

_LEAST = 64


class Deadlines:
    """Deadlines by serial."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._rebuild_at = _LEAST

    def add(self, serial: int, deadline: float, unfinished: Container[int]) -> None:
        """Notes a deadline; ``unfinished`` are the serials of requests that have not ended."""
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[1] in unfinished]
            heapq.heapify(self._heap)
            self._rebuild_at = max(_LEAST, 2 * len(self._heap))
        heapq.heappush(self._heap, (deadline, serial))

    def passed(self, now: float) -> list[int]:
        """Takes out and returns the serials whose deadline has passed, the earliest first; some may have ended before."""
        passed: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[1])
        return passed
