"""Measures for how long a peer that speaks regularly has been silent, and does not mistake a stall of its own for that.

A stopped or overloaded process finds its timers due before it has read what lay in its sockets all the while. So silence only
counts for as long as the process itself was awake: a check that comes late adds no more than it would have in time.
"""

from __future__ import annotations

from collections.abc import Callable


class Silence:
    """Counts the seconds in which a peer was not heard though it could have been.

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
