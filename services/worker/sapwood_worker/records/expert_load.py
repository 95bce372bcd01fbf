"""Experts of a mixture: where they are, how they move from one place to another, and how many tokens they have got."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ExpertPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Which ranks have which experts.

    Attributes:
        ranks: How many ranks have whole experts.
        balance: The tokens that a layer's ranks have got on average lately, divided by those of its busiest; the mean over the
            layers. 1: all have the same. 0: there were no tokens yet.
        moves: Experts that were copied from rank to rank since the start.
        exchanged_bytes: Bytes of tokens' vectors and of expert sums that ranks have sent each other since the start.
        slots: For each layer, the expert in each slot, rank after rank, with the same number of slots on each rank; -1: none.
    """

    ranks: int
    balance: float
    moves: int
    exchanged_bytes: int
    slots: tuple[tuple[int, ...], ...]


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens a model's experts have got since the start.

    Attributes:
        tokens: For each expert the tokens that have gone to it, summed over the layers; empty: the model has no experts.
        balance: The tokens that a layer's experts have on average, divided by those of its busiest; the mean over the layers.
            1: all have the same. 0: there were no tokens yet.
        places: Which ranks have them; None: each rank has a part of every expert.
    """

    tokens: tuple[int, ...] = ()
    balance: float = 0.0
    places: ExpertPlaces | None = None


def expert_load(layers: Sequence[Sequence[int]]) -> ExpertLoad:
    """The load of the experts, summed over the layers."""
    used = [layer for layer in layers if any(layer)]
    balances = [sum(layer) / len(layer) / max(layer) for layer in used]
    return ExpertLoad(tuple(map(sum, zip(*layers, strict=True))), sum(balances) / max(len(balances), 1))


class ExpertMove(msgspec.Struct, frozen=True, array_like=True):
    """The move of an expert into one slot. All moves of a step happen at once: each slot gets the old expert of its source.

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
        experts: A layer's experts; a multiple of ``ranks``.
        ranks: How many there are.
        redundant: Slots beyond one for each expert; a multiple of ``ranks``.
    """
    each = experts // ranks
    empty = [-1] * (redundant // ranks)
    return [slot for rank in range(ranks) for slot in (*range(rank * each, (rank + 1) * each), *empty)]


def moved(slots: list[int], moves: list[ExpertMove]) -> list[int]:
    """The experts in a layer's slots after its moves."""
    after = list(slots)
    for move in moves:
        after[move.slot] = slots[move.source] if move.source >= 0 else -1
    return after
