"""Where the low-rank matrices of a linear layer lie, and which rows of a batch they are for.

A slot holds one adapter. In it the matrices of all linear layers of a decoder layer lie one after another, packed by the
adapter's own rank r: of a linear layer with P parts (projections of one input, outputs side by side), K inputs and N outputs in
all, first A, [P r, K], then B, [N, r]. The layer's place is r times the ``offset``, so that an adapter of a small rank takes
little to copy and to read. Factors are in B already. A part that the adapter leaves alone is zeros.

The rows of a batch are grouped by slot: a group is some rows, not necessarily neighbours, with the same slot. All rows are in
one group each, those without an adapter too (slot -1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Gate = Literal["silu", "gelu_tanh"]
IntArray = npt.NDArray[np.int64]
NONE = -1
"""The slot of rows without an adapter."""


@dataclass(frozen=True, slots=True)
class LoraPlace:
    """Where a linear layer's matrices lie.

    Attributes:
        memory: [slots, cells * largest rank], or a tensor for each slot: the slots of a decoder layer.
        offset: Its place in a slot, in units of the adapter's rank.
        parts: Outputs of each part on this rank.
        columns: Inputs on this rank: K.
    """

    memory: Tensor | Sequence[Tensor]
    offset: int
    parts: tuple[int, ...]
    columns: int

    @property
    def cells(self) -> int:
        """Numbers that it takes for each unit of rank."""
        return len(self.parts) * self.columns + sum(self.parts)

    def matrices(self, slot: int, rank: int) -> tuple[Tensor, Tensor]:
        """A [P rank, K] and B [N, rank] in a slot that holds an adapter of this rank; views."""
        held = self.memory[slot]
        first = rank * self.offset
        middle = first + rank * len(self.parts) * self.columns
        last = middle + rank * sum(self.parts)
        return held[first:middle].view(-1, self.columns), held[middle:last].view(-1, rank)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of a batch by slot; numpy, on the host.

    Attributes:
        order: int64 [T]: the rows, group after group.
        slots: int64 [G]: each group's slot.
        starts: int64 [G]: where its rows begin in ``order``.
        counts: int64 [G]: how many they are, at most ``most``.
    """

    order: IntArray
    slots: IntArray
    starts: IntArray
    counts: IntArray

    @staticmethod
    def of(slots: IntArray, most: int) -> RowGroups:
        """Groups rows. O(T log T), no Python loop over rows.

        Args:
            slots: int64 [T]: each row's slot, ``NONE`` without an adapter; T is at least 1.
            most: The most rows of a group.
        """
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        firsts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        sizes = np.diff(np.append(firsts, len(slots)))
        pieces = -(-sizes // most)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(firsts, pieces) + within * most
        counts = np.minimum(np.repeat(sizes, pieces) - within * most, most)
        return RowGroups(order, np.repeat(ordered[firsts], pieces), starts, counts)


class LoraProducts(Protocol):
    """The products with adapters' matrices, for the rows of the current batch."""

    def shrink(self, place: LoraPlace, x: Tensor) -> Any:
        """``x A.T`` by each row's adapter, for :meth:`add`; may run beside what is launched until then.

        Args:
            place: The linear layer's matrices.
            x: [T, K]; rows may lie apart.
        """
        ...

    def add(self, place: LoraPlace, low: Any, out: Tensor) -> Tensor:
        """Adds the product of ``low``, from :meth:`shrink`, and B.T to ``out`` [T, N], contiguous, in place; returns ``out``."""
        ...

    def add_gated(self, place: LoraPlace, low: Any, out: Tensor, gate: Gate) -> Tensor:
        """The gated activation of :meth:`add`'s sum, of all rows: [T, N / 2]; may overwrite ``out``."""
        ...
