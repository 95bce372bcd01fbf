"""Looks now and then at how a mixture of experts spreads its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

from sapwood_worker.records.expert_load import ExpertLoad, expert_load

_EVERY = 1.0
"""Seconds between two looks while there is work; a GPU is waited for."""


class ExpertWatch:
    """Reports the load of experts when there is a new one.

    Args:
        read: Gives the tokens that each expert of each layer has got.
        clock: Gives seconds.
    """

    def __init__(self, read: Callable[[], list[list[int]]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._looked = clock() - _EVERY
        self._told: ExpertLoad | None = None

    def take(self, *, idle: bool) -> ExpertLoad | None:
        """The load, if it is another than the last that was given; looked at once a second, and when there is no more work.

        Args:
            idle: Whether there is nothing to compute.
        """
        now = self._clock()
        if not idle and now < self._looked + _EVERY:
            return None
        self._looked = now
        load = expert_load(self._read())
        if load == self._told:
            return None
        self._told = load
        return load
