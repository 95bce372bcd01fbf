"""Keeps the inputs of a model's layers, for a head that drafts from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class AuxiliaryHiddenStates:
    """Takes the inputs of some layers, and stores features made of them, a row for each cache slot.

    Args:
        layers: The layers, ascending.
        mix: Makes [T, width] of the hidden states side by side, [T, hidden_size * layers].
        store: [slots, width].
    """

    def __init__(self, layers: Sequence[int], mix: Callable[[Tensor], Tensor], store: Tensor) -> None:
        self._layers = frozenset(layers)
        self._mix = mix
        self._store = store
        self._seen: list[Tensor] = []

    def see(self, layer: int, hidden: Tensor) -> None:
        """Takes the input of a layer, [T, hidden_size], or the output of the last layer; the tensor may be overwritten later."""
        if layer in self._layers:
            self._seen.append(hidden.clone())

    def keep(self, slots: Tensor) -> None:
        """Stores the features of the seen tokens in these slots, int64 [T]."""
        self._store.index_copy_(0, slots, self._mix(torch.cat(self._seen, -1)))
        self._seen = []
