"""Data-parallel attention: each rank has rows of its own, and all ranks compute some layers together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.group import Group

_LEAST_SAVED = 8 << 20
"""The least bytes of padding that each separate exchange must save: about what a link carries while an exchange starts."""


class DataParallelRows:
    """Sends rows from the ranks that have them to layers that are split over all ranks, and returns the layers' sums.

    Each rank pads its rows to the number of the rank that has most; padding rows are not computed. Where few ranks have many
    rows, for example one long prompt, each of these ranks sends its rows in a separate exchange, and the others send none. Before
    the first :meth:`begin`, for example while a graph is captured, every rank has the same number of rows.

    Args:
        group: The ranks.
        ops: The operations of the device where rows are.

    Attributes:
        seen: int64 [1]: a digest of the rows that this rank has computed layers for since :meth:`begin`; the code that takes
            rows to a layer updates it. The digest covers all ranks' rows, so it must be the same on every rank; if not, a rank
            got other rows.
    """

    def __init__(self, group: Group, ops: DeviceOps) -> None:
        self.seen = torch.zeros(1, dtype=torch.int64, device=ops.device)
        self._group = group
        self._ops = ops
        self._counts: Sequence[int] = ()
        self._most = self._own = 0
        self._places: Tensor | None = None
        self._told = False

    def begin(self, counts: Sequence[int]) -> None:
        """Sets how many rows each rank has in the next computation; the host does not wait for the device."""
        self._told, self._places = True, None
        self.seen.zero_()
        self._counts = counts
        self._most, self._own = max(counts), counts[self._group.rank]

    def forget(self) -> None:
        """Restores the state before the first :meth:`begin`. The builder of a model calls this, because the model's graphs are
        captured with this state; another model of the same ranks may have computed steps."""
        self._told, self._places = False, None

    def sizes(self, rows: int) -> tuple[int, int]:
        """How many of these rows belong to this rank, and how many the rank with most rows has."""
        return (self._own, self._most) if self._told else (rows, rows)

    def gather(self, x: Tensor) -> Tensor:
        """This rank's rows [T, W] -> all ranks' in their order, [sum of the counts, W]; rows beyond the rank's own count are not
        sent. The result may be x itself."""
        if not self._told:
            return self._group.gather_rows(x)
        own = x[: self._own]
        if self._apart(x):
            if self._own == sum(self._counts):
                return self._group.broadcast(own.contiguous(), self._group.rank)
            every = x.new_empty(sum(self._counts), x.shape[1])
            for rank, rows in self._rows(every):
                self._group.broadcast(rows.copy_(own) if rank == self._group.rank else rows, rank)
            return every
        every = self._group.gather_rows(_padded(own, self._most))
        return every if (filled := self._filled()) is None else every.index_select(0, filled)

    def scatter_sum(self, x: Tensor, rows: int) -> Tensor:
        """This rank's part of the sum for all rows, in the order of :meth:`gather` -> the sum for its own: [rows, W]; may
        overwrite x."""
        if not self._told:
            return self._group.reduce_scatter(x)
        if self._apart(x):
            own = x[:0]
            for rank, theirs in self._rows(x):
                self._group.reduce(theirs, rank)
                own = theirs if rank == self._group.rank else own
            return _padded(own, rows)
        if (filled := self._filled()) is not None:
            x = x.new_zeros(self._most * self._group.size, x.shape[1]).index_copy_(0, filled, x)
        return _padded(self._group.reduce_scatter(x)[: self._own], rows)

    def _apart(self, x: Tensor) -> bool:
        """Whether ranks exchange their rows one rank at a time. All ranks give the same answer for rows like x."""
        size, most, rows = self._group.size, self._most, sum(self._counts)
        padding = (size * most - rows) * x.shape[1] * x.element_size()
        # In one padded exchange, each rank gets as many rows from each other rank as the longest has; rank by rank, only real
        # rows.
        return rows <= (size - 1) * most and padding > sum(count > 0 for count in self._counts) * _LEAST_SAVED

    def _rows(self, every: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The ranks that have rows, and theirs of all ranks'."""
        for rank, rows in enumerate(every.split_with_sizes(list(self._counts))):
            if len(rows):
                yield rank, rows

    def _filled(self) -> Tensor | None:
        """int64 [sum of the counts]: which of all ranks' padded rows are real rows; None: all. Made for the first layer that
        needs
        it: a step that replays a graph does not."""
        if self._places is None and min(self._counts) < self._most:
            places = [np.arange(count) + rank * self._most for rank, count in enumerate(self._counts)]
            self._places = self._ops.to_device(np.concatenate(places))
        return self._places


def _padded(x: Tensor, rows: int) -> Tensor:
    """[T, W] -> [rows, W], zero after the first T."""
    return x if len(x) == rows else F.pad(x, (0, 0, 0, rows - len(x)))


class PartialSums(Group):
    """A group whose ranks keep their partial sums: the layer's caller sends them to the ranks that need them.

    Args:
        group: The ranks.
    """

    partial = True

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
