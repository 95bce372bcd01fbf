"""Experts that go from one place to another before a step."""

from __future__ import annotations

import msgspec


class ExpertMove(msgspec.Struct, frozen=True, array_like=True):
    """What one slot gets. All moves of a step happen at once: each slot gets what was in its source before.

    The slots of a layer are those of rank 0, then those of rank 1, and so on, equally many on each.

    Attributes:
        layer: Which of the layers with experts.
        slot: The slot.
        source: The slot whose expert it gets; -1: it has none from now on.
    """

    layer: int
    slot: int
    source: int


def home_slots(experts: int, ranks: int, redundant: int) -> list[int]:
    """Which expert is in each slot at the start; -1: none.

    Args:
        experts: Of a layer; a multiple of ``ranks``.
        ranks: How many there are.
        redundant: Slots beyond one for each expert; a multiple of ``ranks``.
    """
    each = experts // ranks
    empty = [-1] * (redundant // ranks)
    return [slot for rank in range(ranks) for slot in (*range(rank * each, (rank + 1) * each), *empty)]


def moved(slots: list[int], moves: list[ExpertMove]) -> list[int]:
    """What is in a layer's slots after its moves."""
    after = list(slots)
    for move in moves:
        after[move.slot] = slots[move.source] if move.source >= 0 else -1
    return after
