"""How a mixture of experts has spread its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a model's experts have got since the start.

    Attributes:
        tokens: For each expert the tokens that have gone to it, summed over the layers; empty: the model has no experts.
        balance: The tokens that a layer's experts have on average, divided by those of its busiest; the mean over the layers.
            1: all have the same. 0: there were no tokens yet.
    """

    tokens: tuple[int, ...] = ()
    balance: float = 0.0


def expert_load(layers: Sequence[Sequence[int]]) -> ExpertLoad:
    """What the experts of each layer have got, together."""
    used = [layer for layer in layers if any(layer)]
    balances = [sum(layer) / len(layer) / max(layer) for layer in used]
    return ExpertLoad(tuple(map(sum, zip(*layers, strict=True))), sum(balances) / max(len(balances), 1))
