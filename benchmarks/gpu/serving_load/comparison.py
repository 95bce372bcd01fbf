"""How much faster one way is than another, measured in turns on a machine whose speed drifts and now and then stumbles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_95 = 1.96
"""Standard deviations to either side in which a normal variable lies 95 times of 100."""
_FEW = 6
"""Of fewer pairs nothing is known with such certainty."""


class Comparison(NamedTuple):
    """A ratio, between what it lies in 95 of 100 such measurements (of few: the least and the most seen), and of how many."""

    ratio: float
    low: float
    high: float
    count: int

    def known_within(self, factor: float) -> bool:
        """Whether the upper bound is less than so many times the lower one, of enough pairs."""
        return self.count >= _FEW and self.high < factor * self.low


def compare(pairs: Sequence[tuple[float, float]]) -> Comparison:
    """The ratio of first to second, of pairs of rates that were measured next to each other and so share the machine's drift.

    Of their log ratios it takes the Hodges-Lehmann estimate (Annals of Mathematical Statistics 34, 1963): the median of all means
    of two of them, each with itself included. Few that stumble hardly move it, as they hardly move a median; but where noise is
    normal it spreads 2 % more than a mean, and a median 25 %. The bounds are the means of two whose ranks Wilcoxon's signed-rank
    test names, in its normal approximation. O(pairs squared).
    """
    logs = [math.log(first / second) for first, second in pairs]
    means = sorted((one + other) / 2 for at, one in enumerate(logs) for other in logs[at:])
    count = len(logs)
    rank = count * (count + 1) / 4 - _95 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    cut = max(0, int(rank))
    ratio, low, high = map(math.exp, (median(means), means[cut], means[-1 - cut]))
    return Comparison(ratio, low, high, count)
