"""Forecasts load: by its present trend, and by the same time of the day before, whichever has lately been nearer to the truth.

The trend is Holt's linear exponential smoothing (two averages: of the load, and of its change). The day before is scaled by how
today's last half hour compares to its own. Both are judged by what they said for now when now was as far off as the time that is
forecast. O(1) for each sample; a day of minutes is kept.
"""

from __future__ import annotations

import math
from collections import deque

_DAY = 86_400
_LEVEL, _SLOPE = 0.5, 0.1
"""How much a new minute counts in the average of the load, and of its change."""
_MOST_RISE = 1.5
"""How many times the present load a trend may foretell: a jump is no trend."""
_ERROR = 0.05
"""How much a new error counts in the average of a method's errors."""
_COMPARED = 30
"""Minutes by which today is compared to the day before."""


class Forecast:
    """The load to come, from samples of what it was.

    Args:
        horizon: Seconds ahead that :meth:`most` looks.
        step: Seconds of a sample; those within one are averaged.
    """

    def __init__(self, horizon: float, step: float = 60.0) -> None:
        self._step = step
        self._ahead = max(1, math.ceil(horizon / step))
        self._day = round(_DAY / step)
        self._history: deque[float] = deque(maxlen=self._day + _COMPARED)
        """Whole steps, the latest last."""
        self._sum, self._count, self._begun = 0.0, 0, -math.inf
        self._level = self._slope = 0.0
        self._said: deque[tuple[float, float | None]] = deque(maxlen=self._ahead)
        """What both methods said, of each step the last of the horizon; the oldest is for now."""
        self._errors = [0.0, 0.0]
        """Average absolute errors: of the trend, and of the day before."""

    def sample(self, now: float, load: float) -> None:
        """The load is so much now.

        Args:
            now: Seconds, not less than before.
            load: In any unit; not less than 0.
        """
        if self._begun == -math.inf:
            self._begun = now
        while now >= self._begun + self._step:
            self._close(self._sum / self._count if self._count else self._level)
            self._begun += self._step
        self._sum += load
        self._count += 1

    def most(self) -> float:
        """The most that the load is expected to be from now to the horizon."""
        if not self._history:
            return self._sum / self._count if self._count else 0.0
        recent = self._sum / self._count if self._count else self._level
        trend = max(self._trend(ahead) for ahead in (0, self._ahead))
        day = [self._of_day_before(ahead) for ahead in range(self._ahead + 1)]
        known = [each for each in day if each is not None]
        by_day = known and self._errors[1] < self._errors[0]
        return max(0.0, recent, max(known) if by_day else min(trend, _MOST_RISE * recent))

    @property
    def error(self) -> float:
        """How far the better method has lately been from the truth, on average."""
        judged = len(self._said) == self._ahead
        return min(self._errors) if judged and len(self._history) > self._day else self._errors[0]

    def _close(self, load: float) -> None:
        self._sum, self._count = 0.0, 0
        if not self._history:
            self._level = load
        if len(self._said) == self._ahead:
            for index, said in enumerate(self._said[0]):
                if said is not None:
                    self._errors[index] += _ERROR * (abs(said - load) - self._errors[index])
                else:
                    self._errors[index] = self._errors[0] * 2
        before = self._level
        self._level = _LEVEL * load + (1 - _LEVEL) * (self._level + self._slope)
        self._slope = _SLOPE * (self._level - before) + (1 - _SLOPE) * self._slope
        self._history.append(load)
        self._said.append((self._trend(self._ahead), self._of_day_before(self._ahead)))

    def _trend(self, ahead: int) -> float:
        return self._level + self._slope * ahead

    def _of_day_before(self, ahead: int) -> float | None:
        """The load so many steps after the last whole one, by the day before; None: it is not known."""
        history = self._history
        index = len(history) - 1 - self._day + ahead
        if index < _COMPARED or index >= len(history):
            return None
        then = [history[index - ahead - back] for back in range(_COMPARED) if index - ahead - back >= 0]
        now = [history[len(history) - 1 - back] for back in range(len(then))]
        if not then or not sum(then):
            return None
        return history[index] * sum(now) / sum(then)
