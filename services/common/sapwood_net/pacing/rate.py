"""A token bucket that may be overdrawn, for costs that are known only afterwards."""

from __future__ import annotations

from collections.abc import Callable

_BURST_SECONDS = 10.0


class Rate:
    """Limits an amount a minute; up to ten seconds' worth of it may be taken at once. O(1).

    Args:
        per_minute: The amount; 0 sets no limit.
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
        """Seconds until ``least``, or the whole burst if that is less, may be taken; 0 if it may be taken now."""
        if not self._per_second:
            return 0.0
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._filled) * self._per_second)
        self._filled = now
        return max(0.0, (min(least, self._burst) - self._left) / self._per_second)

    def take(self, amount: float) -> None:
        """Takes an amount, even if less is left; :meth:`wait` is 0 again once the debt is paid."""
        if self._per_second:
            self._left -= amount
