"""Measures how long a peer that speaks regularly has been silent, without the time in which this process itself stood still.

A stopped or overloaded process finds its timers due before it has read what its sockets received meanwhile. So a check that
comes late adds at most twice the interval between checks.
"""

from __future__ import annotations

from collections.abc import Callable


class Silence:
    """Counts the seconds in which this process could have heard a peer and did not.

    Args:
        interval: Seconds between calls of :meth:`check`.
        clock: Seconds, monotonic.
    """

    def __init__(self, interval: float, clock: Callable[[], float]) -> None:
        self._most_a_check = 2 * interval
        self._clock = clock
        self._seconds = 0.0
        self._checked = clock()

    def heard(self) -> None:
        """The peer gave a sign of life."""
        self._seconds = 0.0
        self._checked = self._clock()

    def check(self) -> float:
        """Seconds of silence so far. To be called every ``interval`` seconds."""
        now = self._clock()
        self._seconds += min(now - self._checked, self._most_a_check)
        self._checked = now
        return self._seconds
