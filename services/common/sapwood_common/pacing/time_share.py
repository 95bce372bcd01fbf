"""Shares an event loop's time among connections that have more to do than one turn should hold.

uvloop reads up to 8 MB of one socket between two polls: a client that sends small frames as fast as it can would have the loop
for seconds. So a connection works on what it has read for ``SLICE`` seconds at most; it keeps the rest, reads no more, and goes
on in later turns, in which all such connections together have ``SLICE`` seconds, one after another. Who has little to say is
never held up by more than that. Nothing is lost for who is alone: turns follow each other at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

SLICE = 0.001
"""Seconds. Of a turn of the loop, for all who have too much to do; and of a turn for what one connection has just read."""
_MOST_FRESH = 2 * SLICE
"""Seconds that connections may spend on what they have just read, beyond half of all time, before each has to wait its turn."""


class Worker(Protocol):
    """Has more to do."""

    def go_on(self, until: float) -> bool:
        """Works until about ``until``, by the clock of its :class:`TimeShare`, and says whether it has still more to do."""
        ...


class TimeShare:
    """Belongs to one event loop.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        measuring: Whether :meth:`is_over` was asked since :meth:`end`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.measuring = False
        self._until = 0.0
        self._began = clock()
        self._fresh = 0.0
        """Seconds that were spent on what was just read, less half of those that have passed."""
        self._waiting: OrderedDict[Worker, None] = OrderedDict()
        self._due = False

    @property
    def waiting(self) -> int:
        """Workers that wait for a later turn."""
        return len(self._waiting)

    def is_over(self) -> bool:
        """Asked now and then by who works on what it has just read: whether it has to stop, and :meth:`add` itself.

        Its time is measured from the first question on, until :meth:`end`.
        """
        now = self.clock()
        if not self.measuring:
            self.measuring = True
            self._fresh = max(0.0, self._fresh - (now - self._began) / 2)
            self._began = now
            self._until = now if self._fresh > _MOST_FRESH else now + SLICE
        return now >= self._until

    def end(self) -> None:
        """It has stopped."""
        self.measuring = False
        self._fresh += self.clock() - self._began

    def add(self, worker: Worker) -> None:
        """Has it go on in later turns, until it has no more to do."""
        self._waiting[worker] = None
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def drop(self, worker: Worker) -> None:
        """It has no more to do."""
        self._waiting.pop(worker, None)

    def _turn(self) -> None:
        began = now = self.clock()
        until = began + SLICE
        while self._waiting and now < until:
            worker, _ = self._waiting.popitem(last=False)
            if worker.go_on(until):
                self._waiting[worker] = None
            now = self.clock()
        self._due = bool(self._waiting)
        if not self._due:
            return
        loop = asyncio.get_running_loop()
        if now - began > 2 * SLICE:  # what cannot be interrupted has taken the others' time: it is theirs now
            loop.call_later(now - began, self._turn)
        else:
            loop.call_soon(self._turn)
