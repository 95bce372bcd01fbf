"""How long decode steps take, by their requests and sampled positions: measured while they run.

The times include the host's work: a step's time runs from one step's tokens to the next step's. A step that checks drafts does
not overlap with the next one. So the first step after a change between the two kinds has a wrong time; it is left out if other
measurements exist.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

LADDER = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of sampled positions whose step times are measured apart."""
_ENOUGH, _TWICE = 3, 2
"""How many measurements without drafts are needed before comparing with them, and how many with drafts before trusting them."""
_LIKELY = 0.75
"""The share of the additional time of drafts, measured with another number of requests, that is expected for this number. It is
below 1, so that drafts that may pay are tried."""
_NEAR = 4
"""A measured step predicts one with the same positions if their numbers of requests differ by at most one part in this many."""
_WEIGHT = 0.2
_KEPT = 4096
"""Steps after which a measurement is forgotten and made again: a draft length that costs too much now may pay later."""
_SHORTEST = 1e-6
"""Seconds that a step takes at least: a clock may not move during a step, and rates divide by this time."""


@dataclass(slots=True)
class _Mean:
    seconds: float
    count: int
    step: int
    changed: bool = False
    """Whether the only measurement is of a first step after a change between steps with and without drafts."""

    def add(self, seconds: float, step: int) -> None:
        """Of the first two measurements the shorter one counts, since a first step may compile; a first one after a change is
        ignored. Later an outlier counts as at most twice the mean."""
        if self.count == 1:
            self.seconds = seconds if self.changed else min(self.seconds, seconds)
        else:
            self.seconds += _WEIGHT * (min(seconds, 2 * self.seconds) - self.seconds)
        self.count += 1
        self.step = step


class StepCosts:
    """Measured durations, in seconds."""

    def __init__(self) -> None:
        self._plain: dict[int, _Mean] = {}
        self._drafted: dict[tuple[int, int], _Mean] = {}
        self._steps = 0
        self._drafting = False

    def note(self, rows: int, positions: int, seconds: float) -> None:
        """Notes the duration of a step that computed no prompt, with its numbers of requests and sampled positions."""
        self._steps += 1
        seconds = max(seconds, _SHORTEST)
        drafting, before = positions > rows, self._drafting
        self._drafting = drafting
        if drafting:
            key = _row_bucket(rows), _rung(positions)
            known = self._drafted.get(key)
            if known is None or self._steps - known.step >= _KEPT:
                self._drafted[key] = _Mean(seconds, 1, self._steps, changed=not before)
            elif before or known.count < _TWICE:
                known.add(seconds, self._steps)
        elif not before:
            mean = self._plain.get(_row_bucket(rows))
            if mean is None:
                self._plain[_row_bucket(rows)] = _Mean(seconds, 1, self._steps)
            else:
                mean.add(seconds, self._steps)

    def plain(self, rows: int) -> float | None:
        """Seconds of a step of this many requests without drafts; None: not known yet."""
        mean = self._plain.get(_row_bucket(rows))
        return mean.seconds if mean is not None and mean.count >= _ENOUGH else None

    def known(self, rows: int, positions: int) -> float | None:
        """Seconds of a step with these numbers of requests and sampled positions; None: not measured, or measured too long
        ago."""
        return self._fresh(_row_bucket(rows), _rung(positions))

    def _fresh(self, bucket: int, rung: int) -> float | None:
        mean = self._drafted.get((bucket, rung))
        fresh = mean is not None and mean.count >= _TWICE and self._steps - mean.step < _KEPT
        return mean.seconds if mean is not None and fresh else None

    def ceiling(self, rows: int, positions: int) -> float:
        """How long a step of this many requests and positions takes if each position takes as long as in the largest smaller
        step whose time is known. The time without drafts (:meth:`plain`) must be known. A first measurement above this ceiling,
        for example of a step that compiles, will not recur."""
        at, seconds = rows, self._plain[_row_bucket(rows)].seconds
        for rung in LADDER:
            if rung >= positions:
                break
            if rung > rows and (known := self.known(rows, rung)) is not None:
                at, seconds = rung, known
        return seconds * positions / at

    def curve(self, rows: int, most: int) -> list[tuple[int, float, bool]]:
        """How long steps with this many requests take that sample up to ``most`` positions; :meth:`plain` must be known.

        Returns:
            For each rung, ascending: its positions; the time of such a step, or a lower bound of it; and whether the time is
                known for this number of requests or a near one.
        """
        bucket = _row_bucket(rows)
        seconds = plain = self._plain[bucket].seconds
        found = []
        for rung in LADDER:
            if rung > rows:
                known = self._fresh(bucket, rung)
                if known is None:
                    known = self._beside(rows, rung, plain)
                if known is None:
                    seconds = max(seconds, plain + _LIKELY * self._longer(rows, rung - rows))
                else:
                    seconds = max(seconds, known)
                found.append((rung, seconds if known is None else known, known is not None))
                if rung >= most:
                    break
        return found

    def _beside(self, rows: int, rung: int, plain: float) -> float | None:
        """How long a step with this many positions takes, estimated from the nearest measured number of requests; None: the
        nearest number is too far."""
        for apart in range(1, max(1, rows // _NEAR) + 1):
            for others in (rows + apart, rows - apart):
                usual = self.plain(others) if 0 < others < rung else None
                known = self._fresh(_row_bucket(others), rung)
                if known is not None and usual is not None:
                    return max(plain, known + plain - usual)
        return None

    def _longer(self, rows: int, drafted: int) -> float:
        """How many seconds longer than plain steps the steps with at most ``drafted`` draft tokens took, measured for the
        nearest number of requests; 0: unknown."""
        found: tuple[int, int, float] | None = None
        for (others, rung), mean in self._drafted.items():
            fresh = mean.count >= _TWICE and self._steps - mean.step < _KEPT
            if not fresh or rung - others > drafted or (plain := self.plain(others)) is None:
                continue
            longer = (mean.seconds - plain) * min(1.0, rows / others)
            found = min(found or (rows + others, 0, 0.0), (abs(rows - others), others - rung, longer))
        return 0.0 if found is None else found[2]

    def stale(self, rows: int, steps: int) -> bool:
        """Whether the last ``steps`` steps include no measured step without drafts of this many requests."""
        mean = self._plain.get(_row_bucket(rows))
        return mean is not None and self._steps - mean.step >= steps


def _row_bucket(rows: int) -> int:
    """The bucket of a number of requests: steps with numbers in one bucket are taken to last equally long."""
    return rows if rows <= 16 else -(-rows // 4) * 4 if rows <= 64 else -(-rows // 16) * 16


def _rung(positions: int) -> int:
    return LADDER[min(bisect_left(LADDER, positions), len(LADDER) - 1)]


# How long a draft model takes, by the number of requests and the tokens of the longest draft: measured during steps.


_OUTLIER = 2.0
_LIKELY_OF_DRAFT = 0.5
"""The time of one more draft token, as a share of a token's time in a shorter draft, until two lengths are measured."""


@dataclass(slots=True)
class _DraftMean:
    seconds: float
    count: int = 1

    def add(self, seconds: float) -> None:
        """Notes a duration. Of the first two only the shorter one counts."""
        if self.count < _TWICE:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += _WEIGHT * (min(seconds, _OUTLIER * self.seconds) - self.seconds)
        self.count += 1


class DraftCosts:
    """Measured durations, in seconds."""

    def __init__(self) -> None:
        self._means: dict[int, dict[int, _DraftMean]] = {}

    def note(self, rows: int, longest: int, seconds: float) -> None:
        """Notes that drafts for ``rows`` requests, the longest of ``longest`` tokens, took ``seconds``."""
        means = self._means.setdefault(rows, {})
        if longest in means:
            means[longest].add(seconds)
        else:
            means[longest] = _DraftMean(seconds)

    def of(self, rows: int, longest: int) -> float | None:
        """The expected time of such drafts, interpolated from shorter and longer ones if their length was not measured; None: no
        length was measured."""
        known = sorted(
            (length, mean.seconds) for length, mean in self._means.get(rows, {}).items() if mean.count >= _TWICE
        )
        if not known:
            return None
        at = bisect_left(known, (longest, 0.0))
        if at < len(known) and known[at][0] == longest:
            return known[at][1]
        if at == 0:  # every draft has a fixed cost
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
            each = _LIKELY_OF_DRAFT * seconds / length
        return seconds + (longest - length) * each
