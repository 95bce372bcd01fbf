"""Deferred calls: work without a waiting caller, done a little in each later turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from sapwood_net.pacing.time_share import SLICE


class Afterwards:
    """Calls back in the order of :meth:`add`, for about ``SLICE`` seconds a turn.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left: deque[Callable[[], None]] = deque()
        self._due = False

    def add(self, work: Callable[[], None]) -> None:
        """Calls ``work`` once, not in this turn; the event loop logs its errors."""
        self._left.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        until = self._clock() + SLICE
        try:
            while self._left:
                self._left.popleft()()
                if self._clock() >= until:
                    break
        finally:
            if self._left:
                self._schedule()
