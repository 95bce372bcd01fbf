"""How long decode steps take, by their requests and sampled positions: measured while they run.

The host's part is in it: what counts is the time from one step's tokens to the next one's. A step that checks drafts is not
overlapped with the next, so that the first steps after a change from one kind to the other take what belongs to the other; they
are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

LADDER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sampled positions of a step that are told apart."""
_ENOUGH = 3
"""Measurements of steps without drafts before any is compared with them."""
_WEIGHT = 0.2
_KEPT = 2048
"""Steps after which a measurement is forgotten, and a guess again stands for it: what is too dear now may not be later."""
_SHORTEST = 1e-6
"""Seconds that a step takes at least: a clock may not move during one, and rates are told by dividing by it."""
_NOISE = 1.05
_GUESSED_ROWS = 32
"""A guess: computing twice the positions takes twice the time, of what a step of so many positions takes in any case."""


@dataclass(slots=True)
class _Mean:
    seconds: float
    count: int
    step: int

    def add(self, seconds: float, step: int) -> None:
        """One outlier, such as a step during which the machine did something else, counts as twice the mean at most."""
        self.seconds += _WEIGHT * (min(seconds, 2 * self.seconds) - self.seconds)
        self.count += 1
        self.step = step


class StepCosts:
    """Measured and guessed durations, in seconds."""

    def __init__(self) -> None:
        self._plain: dict[int, _Mean] = {}
        self._drafted: dict[tuple[int, int], _Mean] = {}
        self._steps = 0
        self._drafting = False

    def note(self, rows: int, positions: int, seconds: float) -> None:
        """Takes the duration of a step of so many requests and sampled positions, which computed no prompt."""
        self._steps += 1
        seconds = max(seconds, _SHORTEST)
        drafting, before = positions > rows, self._drafting
        self._drafting = drafting
        if drafting:
            key = _row_bucket(rows), _rung(positions)
            known = self._drafted.get(key)
            if known is None:
                self._drafted[key] = _Mean(seconds, 1, self._steps)
            elif before:
                known.add(seconds, self._steps)
        elif not before:
            mean = self._plain.setdefault(_row_bucket(rows), _Mean(seconds, 0, self._steps))
            mean.add(seconds, self._steps)

    def plain(self, rows: int) -> float | None:
        """Of a step of so many requests without drafts; None: not known yet."""
        mean = self._plain.get(_row_bucket(rows))
        return mean.seconds if mean is not None and mean.count >= _ENOUGH else None

    def drafted(self, rows: int, positions: int) -> float:
        """Of a step of so many requests that samples so many positions; :meth:`plain` must be known."""
        bucket, rung = _row_bucket(rows), _rung(positions)
        known = self._drafted.get((bucket, rung))
        if known is not None and self._steps - known.step < _KEPT:
            return known.seconds
        plain = self._plain[bucket].seconds
        guess = plain * (1 + (positions - rows) / (rows + _GUESSED_ROWS))
        for other in reversed(LADDER[: LADDER.index(rung)]):
            fewer = self._drafted.get((bucket, other))
            if other > rows and fewer is not None and self._steps - fewer.step < _KEPT:
                # As many more cost as these did, but for what may be noise.
                each = max(0.0, fewer.seconds - _NOISE * plain) / (other - rows)
                return max(guess, fewer.seconds, plain + each * (positions - rows))
        return guess

    def stale(self, rows: int, steps: int) -> bool:
        """Whether no step of so many requests without drafts was measured among the last so many steps."""
        mean = self._plain.get(_row_bucket(rows))
        return mean is not None and self._steps - mean.step >= steps


def _row_bucket(rows: int) -> int:
    """Numbers of requests whose steps are taken to last alike are one."""
    return rows if rows <= 16 else -(-rows // 4) * 4 if rows <= 64 else -(-rows // 16) * 16


def _rung(positions: int) -> int:
    return LADDER[min(bisect_left(LADDER, positions), len(LADDER) - 1)]
