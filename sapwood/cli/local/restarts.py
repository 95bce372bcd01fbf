"""Decides whether and when to restart a process that ended: with growing pauses, a limited number of times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MOST = 5
WINDOW = 600.0
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0


class Restarts:
    """The restarts of one process: at most MOST in WINDOW seconds, each after twice the pause before the last one.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Seconds until the restart, which is counted; None if there have been too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= MOST:
            return None
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** len(self._times))
        self._times.append(now)
        return delay
