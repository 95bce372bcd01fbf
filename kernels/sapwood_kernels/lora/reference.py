"""Plain torch: the products of adapters, group by group. What a CPU runs, and the oracle of the kernels.

Cost of a group of n rows: n r (P K + N), two small products and a sum for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.lora.layout import NONE, Gate, IntArray, LoraPlace, RowGroups

_ALL = 1 << 62
"""More rows than a step has."""


class TorchLora:
    """Implements :class:`~sapwood_kernels.lora.layout.LoraProducts`.

    Args:
        ranks: int64 [slots]: the rank of the adapter in each slot, on the host; may change between batches.
        gated: Makes a gated activation.
        device: Where the rows are.
    """

    def __init__(
        self, ranks: IntArray, gated: Callable[[Gate], Callable[[Tensor], Tensor]], device: torch.device
    ) -> None:
        self._ranks, self._gated, self._device = ranks, gated, device
        self._groups: Sequence[tuple[int, slice | Tensor]] = ()

    def begin(self, slots: IntArray) -> None:
        """The rows of the batch that is computed next: int64 [T], each row's slot."""
        groups = RowGroups.of(slots, _ALL)
        self._groups = [
            (slot, self._rows(groups.order[start : start + count]))
            for slot, start, count in zip(groups.slots.tolist(), groups.starts, groups.counts, strict=True)
            if slot != NONE
        ]

    def _rows(self, rows: IntArray) -> slice | Tensor:
        """The same rows as an index: without a copy if they are neighbours."""
        first, count = int(rows[0]), len(rows)
        if rows[-1] - first + 1 == count:
            return slice(first, first + count)
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self._device)

    def shrink(self, place: LoraPlace, x: Tensor) -> list[Tensor]:
        """[n, P r] of each group of n rows whose adapter has rank r."""
        return [x[rows] @ place.matrices(slot, int(self._ranks[slot]))[0].t() for slot, rows in self._groups]

    def add(self, place: LoraPlace, low: list[Tensor], out: Tensor) -> Tensor:
        for (slot, rows), found in zip(self._groups, low, strict=True):
            rank, first = int(self._ranks[slot]), 0
            _, b = place.matrices(slot, rank)
            for part, size in enumerate(place.parts):
                each, matrix = found[:, part * rank : (part + 1) * rank], b[first : first + size]
                if isinstance(rows, slice):
                    out[rows, first : first + size].addmm_(each, matrix.t())
                else:
                    out[:, first : first + size].index_add_(0, rows, each @ matrix.t())
                first += size
        return out

    def add_gated(self, place: LoraPlace, low: list[Tensor], out: Tensor, gate: Gate) -> Tensor:
        return self._gated(gate)(self.add(place, low, out))
