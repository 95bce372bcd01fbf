"""Shares an event loop's time among connections that have more to do than one turn should hold.

uvloop reads up to 8 MB of one socket between two polls: a client that sends small frames as fast as it can would have the loop
for seconds. So a connection processes received data for ``SLICE`` seconds at most. It keeps the rest, reads no more, and
continues in later turns. In each of these all such connections together have ``SLICE`` seconds, one after another. Those with
little left continue before those with much, who have a third of the time at least. Among very many with little left the newest
has every second turn, so that it does not wait for all of them. A connection that is alone loses nothing: turns follow each other
at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

SLICE = 0.0005
"""Seconds that one connection may process data it has just read, and seconds in each turn for all connections with work left."""
_FAIR = 8
"""Workers with little to do beyond which every second one is the newest: it does not wait for a thousand of them."""
_MOST_FRESH = 2 * SLICE
"""Seconds beyond half of all time in which connections may process data they have just read, before each waits for a later
turn."""


class Worker(Protocol):
    """Something with work left for later turns."""

    def go_on(self, until: float) -> bool:
        """Works until about ``until``, by the clock of its :class:`TimeShare`; returns whether it has work left."""
        ...


class TimeShare:
    """Shares the time of one event loop.

    Args:
        clock: Seconds, monotonic.
        rest: How many times as long as they work all that have work left rest after it. What is new to it has as much less.

    Attributes:
        measuring: Whether :meth:`is_over` was asked since :meth:`end`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, rest: float = 0.0) -> None:
        self.clock = clock
        self._rest = rest
        self._share = 1 / (2 + 2 * rest)
        """The share of all time that connections may spend on data they have just read."""
        self._rests_until = 0.0
        self.measuring = False
        self._until = 0.0
        self._began = clock()
        self._fresh = 0.0
        """Seconds spent on what was just read, minus half of the time that has passed, or less where there is a rest."""
        self._light: OrderedDict[Worker, None] = OrderedDict()
        self._waiting: OrderedDict[Worker, None] = OrderedDict()
        self._due = False
        self._newest = False

    @property
    def waiting(self) -> int:
        """Workers that wait for a later turn."""
        return len(self._light) + len(self._waiting)

    def is_over(self) -> bool:
        """Whether a connection that processes data it has just read has used up its time; it then stops, and calls :meth:`add`.

        The time counts from the first call of this method until :meth:`end`.
        """
        now = self.clock()
        if not self.measuring:
            self.measuring = True
            fresh = self._fresh - (now - self._began) * self._share
            self._fresh = fresh if fresh > 0.0 else 0.0
            self._began = now
            self._until = now if fresh > _MOST_FRESH else now + SLICE
        return now >= self._until

    def end(self) -> None:
        """Ends the measurement that :meth:`is_over` began: the connection has stopped."""
        self.measuring = False
        self._fresh += self.clock() - self._began

    def add(self, worker: Worker, *, light: bool = False) -> None:
        """Lets a worker continue in later turns, until it has no work left.

        Args:
            worker: The worker.
            light: Whether it has little to do.
        """
        if light and worker not in self._waiting:
            self._light[worker] = None
        else:
            self._light.pop(worker, None)
            self._waiting[worker] = None
        if not self._due:
            self._due = True
            self._schedule(self._rests_until - self.clock() if self._rest else 0.0)

    def drop(self, worker: Worker) -> None:
        """Gives a worker no more turns."""
        self._light.pop(worker, None)
        self._waiting.pop(worker, None)

    def _turn(self) -> None:
        began = now = self.clock()
        for queue in (self._light, self._waiting):
            until = max(began + SLICE, now + SLICE / 2)
            while queue and now < until:
                self._newest = not self._newest and queue is self._light and len(queue) > _FAIR
                worker, _ = queue.popitem(last=self._newest)
                if worker.go_on(until):
                    self._waiting[worker] = None
                now = self.clock()
        rest = self._rest * (now - began)
        self._rests_until = now + rest
        self._due = bool(self._light or self._waiting)
        if self._due:
            # If a worker that cannot be interrupted took other connections' time, these get the same time.
            self._schedule(max(rest, now - began if now - began > 2 * SLICE else 0.0))

    def _schedule(self, delay: float) -> None:
        loop = asyncio.get_running_loop()
        if delay > 0:
            loop.call_later(delay, self._turn)
        else:
            loop.call_soon(self._turn)
