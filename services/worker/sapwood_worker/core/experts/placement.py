"""Which ranks a layer's experts are on, and the next change that evens out what the ranks compute.

An expert may be on several ranks, among which its tokens are shared out equally. So that few experts move, changes are chosen one
after another, each the one that takes most from the busiest rank. A change copies an expert to another rank, moves it there, or
gives a copy up. If the other rank is full, an expert that is elsewhere too makes room, or one goes the other way.

Source: greedy replication as in DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB), made incremental by local search, as for
the makespan of parallel machines (Finn and Horowitz, "A linear time approximation algorithm for multiprocessor scheduling",
1979).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]
Places = npt.NDArray[np.bool_]

_POWER = 16
"""A change has to lower the sum of the ranks' loads to this power. It is high, so that the busiest rank counts, and finite, so
that of two equally busy ranks one may be relieved before the other."""
LEAST_GAIN = 0.1
"""The least part of that sum that a change takes away: the busiest rank's load then sinks by about 0.7 %."""


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a layer's experts at once.

    Attributes:
        adds: Experts, and the ranks that get them.
        drops: Experts, and the ranks that have them no more.
    """

    adds: tuple[tuple[int, int], ...] = ()
    drops: tuple[tuple[int, int], ...] = ()

    def made(self, places: Places) -> Places:
        """Where the experts are after this change."""
        result = places.copy()
        for expert, rank in self.drops:
            result[expert, rank] = False
        for expert, rank in self.adds:
            result[expert, rank] = True
        return result


def rank_loads(loads: Loads, places: Places) -> Loads:
    """What each rank computes, [R]. O(E * R).

    Args:
        loads: [E]: the tokens of each expert.
        places: [E, R]: whether an expert is on a rank; each is on one at least.
    """
    result: Loads = (loads / places.sum(1)) @ places
    return result


def balance(loads: Loads) -> float:
    """What ranks have on average, divided by what the busiest has. 1: all have the same. 0: there is nothing."""
    return float(loads.mean() / loads.max()) if loads.any() else 0.0


def next_change(loads: Loads, places: Places, room: int) -> Change | None:
    """The change by which the busiest rank is relieved best; None: none is worth it. O(R * room^2) norms of R numbers each.

    Args:
        loads: [E]: the tokens of each expert.
        places: [E, R]: whether an expert is on a rank; each is on one at least.
        room: Most experts that a rank can have.
    """
    now = rank_loads(loads, places)
    if not now.any():
        return None
    scale = now.mean()
    best, found = float(_norm(now / scale)) * (1 - LEAST_GAIN), None
    for after, changes in _Options(loads / scale, places, room, int(now.argmax())).all():
        norms = _norm(now / scale + after)
        if not norms.size:
            continue
        at = int(norms.argmin())
        if norms.flat[at] < best:
            best, found = float(norms.flat[at]), (changes, np.unravel_index(at, norms.shape))
    if found is None:
        return None
    changes, index = found
    return changes.at(tuple(int(each) for each in index))


def _norm(loads: Loads) -> Loads:
    result: Loads = (loads**_POWER).sum(-1)
    return result


@dataclass(frozen=True, slots=True)
class _Kind:
    """Changes of one kind between the busiest rank and another.

    Attributes:
        busy: The busiest rank.
        other: The other.
        moved: Its experts that may go, by the first index of a change.
        instead: What the other may give up, by the second; -1: nothing.
        keeps: Whether the busiest keeps what goes.
        swaps: Whether the busiest gets what the other gives up.
    """

    busy: int
    other: int
    moved: npt.NDArray[np.intp]
    instead: npt.NDArray[np.intp]
    keeps: bool = False
    swaps: bool = False

    def at(self, index: tuple[int, ...]) -> Change:
        expert, given = int(self.moved[index[0]]), int(self.instead[index[1]])
        adds, drops = [(expert, self.other)], [] if self.keeps else [(expert, self.busy)]
        if given >= 0:
            drops.append((given, self.other))
        if self.swaps:
            adds.append((given, self.busy))
        return Change(tuple(adds), tuple(drops))


@dataclass(frozen=True, slots=True)
class _Drops:
    """Copies that the busiest rank may give up, by the only index of a change."""

    busy: int
    dropped: npt.NDArray[np.intp]

    def at(self, index: tuple[int, ...]) -> Change:
        return Change(drops=((int(self.dropped[index[0]]), self.busy),))


class _Options:
    """All changes that take something from a rank, and what they add to each rank's load.

    Args:
        loads: [E].
        places: [E, R].
        room: Most experts of a rank.
        busy: The rank.
    """

    def __init__(self, loads: Loads, places: Places, room: int, busy: int) -> None:
        self._places, self._room, self._busy = places, room, busy
        self._copies = places.sum(1)
        share, more, fewer = (loads / np.maximum(self._copies + step, 1) for step in (0, 1, -1))
        self._share = share
        # What a copy more, or one given up, adds to the ranks that have the expert anyway.
        self._copied, self._dropped = ((each - share)[:, None] * places for each in (more, fewer))
        self._more, self._fewer = more, fewer

    def all(self) -> Iterator[tuple[Loads, _Kind | _Drops]]:
        """Kind after kind: float64 [..., R], and what an index stands for."""
        busy, places = self._busy, self._places
        ranks = np.eye(places.shape[1])
        here = places[:, busy]
        (spare,) = np.nonzero(here & (self._copies > 1))
        yield self._given_up(spare, ranks[busy]), _Drops(busy, spare)
        for other in range(places.shape[1]):
            if other == busy:
                continue
            there = places[:, other]
            (moved,) = np.nonzero(here & ~there)
            (spare,) = np.nonzero(there & (self._copies > 1))
            after = self._given_up(spare, ranks[other])
            if there.sum() < self._room:
                after = np.concatenate((np.zeros((1, len(ranks))), after))
                spare = np.concatenate(([-1], spare))
            copied = self._copied[moved] + self._more[moved, None] * ranks[other]
            yield copied[:, None] + after, _Kind(busy, other, moved, spare, keeps=True)
            turned = self._share[moved, None] * (ranks[other] - ranks[busy])
            yield turned[:, None] + after, _Kind(busy, other, moved, spare)
            (given,) = np.nonzero(there & ~here)
            back = self._share[given, None] * (ranks[busy] - ranks[other])
            yield turned[:, None] + back, _Kind(busy, other, moved, given, swaps=True)
            if here.sum() < self._room:
                yield copied[:, None] + back, _Kind(busy, other, moved, given, keeps=True, swaps=True)

    def _given_up(self, experts: npt.NDArray[np.intp], rank: Loads) -> Loads:
        """What is added if a rank, by its unit vector, gives up its copy of one of these experts: [experts, R]."""
        result: Loads = self._dropped[experts] - self._fewer[experts, None] * rank
        return result
