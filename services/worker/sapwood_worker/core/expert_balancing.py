"""Where the experts of a mixture are: how evenly their tokens fall on ranks, and which experts move. Knows no model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_worker.core.observers import Observer
from sapwood_worker.ipc.messages import Step
from sapwood_worker.records.expert_load import ExpertLoad, ExpertMove, ExpertPlaces, expert_load, home_slots, moved
from sapwood_worker.records.step import Step as PlannedStep

# Which ranks a layer's experts are on, and the next change that evens out what the ranks compute.
#
# An expert may be on several ranks, among which its tokens are shared out equally. So that few experts move, changes
# are chosen one after another, each the one that takes most from the busiest rank. A change copies an expert to another
# rank, moves it there, or gives a copy up. If the other rank is full, an expert that is elsewhere too makes room, or
# one goes the other way.
#
# Source: greedy replication as in DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB), made incremental by local
# search, as for the makespan of parallel machines (Finn and Horowitz, "A linear time approximation algorithm for
# multiprocessor scheduling", 1979).


Loads = npt.NDArray[np.float64]
Places = npt.NDArray[np.bool_]

_POWER = 16
"""A change has to lower the sum of the ranks' loads to this power. It is high, so that the busiest rank counts, and finite, so
that of two equally busy ranks one may be relieved before the other."""
LEAST_GAIN = 0.1
"""The least part of that sum that a change takes away: the busiest rank's load then sinks by about 0.7 %."""


@dataclass(frozen=True, slots=True)
class Change:
    """The changes to a layer's experts in one step.

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
    """How many tokens each rank computes, [R]. O(E * R).

    Args:
        loads: [E]: the tokens of each expert.
        places: [E, R]: whether an expert is on a rank; each is on one at least.
    """
    result: Loads = (loads / places.sum(1)) @ places
    return result


def balance(loads: Loads) -> float:
    """The average number of tokens of the ranks, divided by that of the busiest. 1: all have the same. 0: there are no tokens."""
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
        # How the load of an expert's other ranks changes with one more copy, or one copy less.
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
        """The change of the ranks' loads if a rank, given as a unit vector, gives up its copy of one of these experts: [experts,
        R]."""
        result: Loads = self._dropped[experts] - self._fewer[experts, None] * rank
        return result


# Evens out what the experts of a mixture give the ranks to compute: a few experts at a time are copied between steps.


_TOKENS = 64
"""Tokens that an expert has on average before the load is judged: of fewer, chance makes the differences."""
EVEN = 0.97
"""Balance of a layer's ranks above which nothing is looked for."""


class ExpertBalancer:
    """Knows which expert is in which slot of each layer, and how many tokens the experts have got lately.

    Args:
        ranks: That the experts are on.
        redundant: Slots of a layer beyond one for each expert. 0: experts stay where they are.

    Attributes:
        ranks: That the experts are on.
        slots: For each layer the expert in each slot, rank after rank; -1: none. Empty before the first look.
        moves: Experts that were copied from rank to rank so far.
    """

    def __init__(self, ranks: int, redundant: int) -> None:
        self.ranks = ranks
        self.slots: list[list[int]] = []
        self.moves = 0
        self._redundant = redundant
        self._seen: Loads = np.zeros((0, 0))
        self._recent: Loads = np.zeros((0, 0))
        self._due: deque[int] = deque()

    @property
    def rank_balance(self) -> float:
        """The average number of tokens of a layer's ranks lately, divided by that of the busiest; the mean over layers with
        tokens."""
        found = [self._balance(layer) for layer in range(len(self.slots)) if self._recent[layer].any()]
        return sum(found) / max(len(found), 1)

    def see(self, totals: Sequence[Sequence[int]]) -> None:
        """Takes in how many tokens each expert has got since the start; older tokens count less and less. O(layers * E * ranks).

        Args:
            totals: For each layer the tokens of each expert.
        """
        counts = np.array(totals, np.float64)
        if not self.slots:
            self.slots = [home_slots(len(layer), self.ranks, self._redundant) for layer in totals]
            self._seen = self._recent = np.zeros_like(counts)
        fresh = counts - self._seen
        if not counts.size or (fresh.mean() < _TOKENS and self._recent.any()):
            return
        self._seen, self._recent = counts, self._recent / 2 + fresh
        if self._redundant and self._recent.mean() >= _TOKENS:
            uneven = {layer: even for layer in range(len(counts)) if 0 < (even := self._balance(layer)) < EVEN}
            self._due = deque(sorted(uneven, key=uneven.__getitem__))

    def take(self) -> tuple[ExpertMove, ...]:
        """What moves before the next step, which is sure to be launched: one change of one layer, so that no rank gives or gets
        more than one expert. O(ranks * (slots of a rank)^2) norms."""
        if not self._due:
            return ()
        layer = self._due.popleft()
        change = next_change(self._recent[layer], self._places(layer), self._room(layer))
        if change is None:
            return ()
        moves = self._moves_of(layer, change)
        self.slots[layer] = moved(self.slots[layer], moves)
        self.moves += len(change.adds)
        self._due.append(layer)
        return tuple(moves)

    def _room(self, layer: int) -> int:
        return len(self.slots[layer]) // self.ranks

    def _places(self, layer: int) -> Places:
        places = np.zeros((self._recent.shape[1], self.ranks), np.bool_)
        experts = np.array(self.slots[layer])
        (slots,) = np.nonzero(experts >= 0)
        places[experts[slots], slots // self._room(layer)] = True
        return places

    def _balance(self, layer: int) -> float:
        return balance(rank_loads(self._recent[layer], self._places(layer)))

    def _moves_of(self, layer: int, change: Change) -> list[ExpertMove]:
        """The change by slots: an expert that comes to a rank takes the slot of one that leaves it, or an empty slot."""
        slots, room = self.slots[layer], self._room(layer)
        left = {(expert, rank): rank * room + self._of(layer, rank).index(expert) for expert, rank in change.drops}
        moves = []
        for expert, rank in change.adds:
            free = [slot for (_, of), slot in left.items() if of == rank]
            slot = free[0] if free else rank * room + self._of(layer, rank).index(-1)
            left = {key: each for key, each in left.items() if each != slot}
            moves.append(ExpertMove(layer, slot, slots.index(expert)))
        return [*moves, *(ExpertMove(layer, slot, -1) for slot in left.values())]

    def _of(self, layer: int, rank: int) -> list[int]:
        room = self._room(layer)
        return self.slots[layer][rank * room : (rank + 1) * room]


# Looks now and then at how a mixture of experts spreads its tokens.


_EVERY = 1.0
"""Seconds between two looks while there is work."""


class ExpertWatch(Observer):
    """Reports the load of experts when there is a new one.

    While there is work, what is asked is read a turn of the loop later, when the steps that it counts are over: so the device is
    not waited for.

    Args:
        ask: Asks how many tokens each expert of each layer has got; it returns a function that waits for the numbers.
        clock: Gives seconds.
        balancer: Moves experts between ranks by what is seen; None: ranks have no whole experts.
        exchanged: Maps the number of tokens that experts got to the bytes that ranks have sent each other.
    """

    def __init__(
        self,
        ask: Callable[[], Callable[[], list[list[int]]]],
        clock: Callable[[], float] = time.monotonic,
        balancer: ExpertBalancer | None = None,
        exchanged: Callable[[int], int] = lambda tokens: 0,
    ) -> None:
        self._ask, self._clock, self._balancer, self._exchanged = ask, clock, balancer, exchanged
        self._looked = clock() - _EVERY
        self._asked: Callable[[], list[list[int]]] | None = None
        self._told: ExpertLoad | None = None

    def planned(self, step: PlannedStep) -> None:
        step.moves = self.moves()

    def report(self, message: Step, *, idle: bool) -> bool:
        message.experts = self.take(idle=idle)
        return message.experts is not None

    def take(self, *, idle: bool) -> ExpertLoad | None:
        """The load, if it is another than the last that was given; looked at once a second, and when there is no more work.

        Args:
            idle: Whether there is nothing to compute.
        """
        now = self._clock()
        asked, self._asked = self._asked, None
        if idle:
            asked = self._ask()
        elif asked is None:
            if now >= self._looked + _EVERY:
                self._looked, self._asked = now, self._ask()
            return None
        totals = asked()
        load = expert_load(totals)
        if (balancer := self._balancer) is not None:
            balancer.see(totals)
            slots = tuple(map(tuple, balancer.slots))
            exchanged = self._exchanged(sum(load.tokens))
            places = ExpertPlaces(balancer.ranks, balancer.rank_balance, balancer.moves, exchanged, slots)
            load = msgspec.structs.replace(load, places=places)
        if load == self._told:
            return None
        self._told = load
        return load

    def moves(self) -> tuple[ExpertMove, ...]:
        """The experts that move before the next step, which is sure to be launched."""
        return () if self._balancer is None else self._balancer.take()
