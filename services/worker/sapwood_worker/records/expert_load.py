"""How a mixture of experts has spread its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ExpertPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Which ranks have which experts.

    Attributes:
        ranks: That have whole experts.
        balance: The tokens that a layer's ranks have got on average lately, divided by those of its busiest; the mean over the
            layers. 1: all have the same. 0: there were no tokens yet.
        moves: Experts that were copied from rank to rank since the start.
        slots: For each layer the expert in each slot, rank after rank, equally many for each; -1: none.
    """

    ranks: int
    balance: float
    moves: int
    slots: tuple[tuple[int, ...], ...]


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a model's experts have got since the start.

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
    """What the experts of each layer have got, together."""
    used = [layer for layer in layers if any(layer)]
    balances = [sum(layer) / len(layer) / max(layer) for layer in used]
    return ExpertLoad(tuple(map(sum, zip(*layers, strict=True))), sum(balances) / max(len(balances), 1))
