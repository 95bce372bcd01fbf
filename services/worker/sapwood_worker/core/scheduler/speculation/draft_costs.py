"""How long it takes to make drafts that are computed, by their requests and the tokens of the longest: measured meanwhile."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_TWICE = 2
"""Measurements before one is trusted: the first may compile or load something, or computes what a request had before."""
_WEIGHT, _OUTLIER = 0.2, 2.0
_LIKELY = 0.5
"""What a further token of a draft takes of what a token of a shorter one took, until two lengths are known."""


@dataclass(slots=True)
class _Mean:
    seconds: float
    count: int = 1

    def add(self, seconds: float) -> None:
        """Takes a duration. Of the first two only the shorter one counts."""
        if self.count < _TWICE:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += _WEIGHT * (min(seconds, _OUTLIER * self.seconds) - self.seconds)
        self.count += 1


class DraftCosts:
    """Measured durations, in seconds."""

    def __init__(self) -> None:
        self._means: dict[int, dict[int, _Mean]] = {}

    def note(self, rows: int, longest: int, seconds: float) -> None:
        """Drafts for so many requests, the longest of so many tokens, took so long."""
        means = self._means.setdefault(rows, {})
        if longest in means:
            means[longest].add(seconds)
        else:
            means[longest] = _Mean(seconds)

    def of(self, rows: int, longest: int) -> float | None:
        """What such drafts take, if nothing is known of their length what shorter and longer ones let expect; None: of no
        length anything is known."""
        known = sorted(
            (length, mean.seconds) for length, mean in self._means.get(rows, {}).items() if mean.count >= _TWICE
        )
        if not known:
            return None
        at = bisect_left(known, (longest, 0.0))
        if at < len(known) and known[at][0] == longest:
            return known[at][1]
        if at == 0:  # a draft takes something whatever its length
            length, seconds = known[0]
            return seconds * (1 + longest / length) / 2
        length, seconds = known[at - 1]
        if at < len(known):
            further, later = known[at]
            each = (later - seconds) / (further - length)
        elif at > 1:
            nearer, earlier = known[at - 2]
            each = max(0.0, seconds - earlier) / (length - nearer)
        else:
            each = _LIKELY * seconds / length
        return seconds + (longest - length) * each
