"""Evens out what the experts of a mixture give the ranks to compute: a few experts at a time are copied between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from sapwood_worker.core.experts.placement import Change, Loads, Places, balance, next_change, rank_loads
from sapwood_worker.records.experts import ExpertMove, home_slots, moved

_TOKENS = 64
"""Tokens that an expert has on average before the load is judged: of fewer, chance makes the differences."""
EVEN = 0.97
"""Balance of a layer's ranks above which nothing is looked for."""


class ExpertBalancer:
    """Knows which expert is in which slot of each layer, and what the experts have got lately.

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
        """What a layer's ranks have got on average lately, divided by what the busiest has; the mean over layers with tokens."""
        found = [self._balance(layer) for layer in range(len(self.slots)) if self._recent[layer].any()]
        return sum(found) / max(len(found), 1)

    def see(self, totals: Sequence[Sequence[int]]) -> None:
        """Takes in what experts have got since the start, of which older tokens count less and less. O(layers * E * ranks).

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
        """The change by slots: what comes takes the place of what leaves the same rank, or an empty one."""
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
