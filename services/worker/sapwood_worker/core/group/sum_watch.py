"""Looks now and then how often ranks have summed tensors, and by which methods."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY = 1.0
"""Seconds between two looks while there is work."""


class SumWatch:
    """Reports the counts when there are new ones.

    Args:
        read: Gives how often each method was used, of what is computed by now.
        clock: Gives seconds.
    """

    def __init__(self, read: Callable[[], dict[str, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._looked = clock() - _EVERY
        self._told: dict[str, int] | None = None

    def take(self, *, idle: bool) -> dict[str, int] | None:
        """The counts, if they are others than the last that were given; looked at once a second, and when work ends.

        Args:
            idle: Whether there is nothing to compute.
        """
        now = self._clock()
        if not idle and now < self._looked + _EVERY:
            return None
        self._looked = now
        counts = self._read()
        if counts == self._told:
            return None
        self._told = counts
        return counts
