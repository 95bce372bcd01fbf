"""Plans the workers of one role: as many as the forecast load needs, corrected by whether the objective is kept.

A worker is added as soon as it is needed, and taken away only when it was not for some time: one that goes takes its cache along.
What a worker can do is given, and learned: while first tokens are late although workers have no more than they can do, less is
believed, and slowly more again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from sapwood.scaler.forecast import Forecast

_KEPT = 0.99
"""Share of first tokens that are to be in time."""
_LESS, _MORE = 0.93, 1.0002
"""Factors of what a worker is believed to do, for each look with the objective missed, and kept."""
_LEAST = 0.3
"""The least that is believed, as a share of what was given."""
_SPREAD = 1.0
"""How many times the square root of the load is added: requests come by chance, and so many standard deviations are to fit."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a plan.

    Attributes:
        per_worker: Requests at a time with which a worker still keeps the objective.
        least, most: Workers.
        start: Seconds until a new worker takes requests.
        patience: Seconds for which a worker is not needed before it goes.
    """

    per_worker: float
    least: int = 1
    most: int = 64
    start: float = 60.0
    patience: float = 300.0


class Plan:
    """The workers of one role.

    Args:
        bounds: Its bounds.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._forecast = Forecast(bounds.start + 60.0)
        self._needed: deque[tuple[float, int]] = deque()
        """When how many were needed, in the last seconds of patience; falling."""
        self.believed = bounds.per_worker
        """Requests at a time that a worker is believed to do within the objective."""

    def look(self, now: float, requests: float, workers: int, in_time: float | None = None) -> int:
        """How many workers there should be.

        Args:
            now: Seconds, not less than before.
            requests: Those that run or wait.
            workers: How many take requests.
            in_time: Share of the first tokens since the last look that came in time; None: there were none, or nobody measures.
        """
        bounds = self._bounds
        if in_time is not None:
            missed = in_time < _KEPT and requests <= 1.1 * self.believed * max(1, workers)
            believed = self.believed * (_LESS if missed else _MORE)
            self.believed = min(bounds.per_worker, max(_LEAST * bounds.per_worker, believed))
        self._forecast.sample(now, requests)
        load = self._forecast.most()
        load += _SPREAD * max(math.sqrt(load), self._forecast.error)
        needed = min(bounds.most, max(bounds.least, math.ceil(load / self.believed)))
        if not self._needed:  # what was there before may be needed: nothing is known of the time before
            needed = max(needed, min(bounds.most, workers))
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now, needed))
        while self._needed[0][0] < now - bounds.patience:
            self._needed.popleft()
        return self._needed[0][1]
