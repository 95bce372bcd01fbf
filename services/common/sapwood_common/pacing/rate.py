"""A token bucket that may be overdrawn: for what costs so much as is known only afterwards."""

from __future__ import annotations

from collections.abc import Callable

_BURST_SECONDS = 10.0


class Rate:
    """So much a minute, with ten seconds' worth of it at once. O(1).

    Args:
        per_minute: How much; 0 is without limit.
        clock: Seconds, monotonic.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._per_second = per_minute / 60
        self._clock = clock
        self._burst = max(1.0, self._per_second * _BURST_SECONDS)
        self._left = self._burst
        self._filled = clock()

    def wait(self, least: float = 1.0) -> float:
        """Seconds until ``least`` is left (at most the burst is asked for); 0 if it is."""
        if not self._per_second:
            return 0.0
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._filled) * self._per_second)
        self._filled = now
        return max(0.0, (min(least, self._burst) - self._left) / self._per_second)

    def take(self, amount: float) -> None:
        """Takes, whether it is there or not: what is owed has to come in again before :meth:`wait` is 0."""
        if self._per_second:
            self._left -= amount
