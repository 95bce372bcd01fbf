"""A virtual clock and what happens when."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class Events:
    """What is due, in order of time. ``now`` stands still while something happens; seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tasks = 0
        """Coroutines that wait for a turn: they run between what happens."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), action))

    async def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
            if self.tasks:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        self.now = until

    def clear(self) -> None:
        self._due.clear()
