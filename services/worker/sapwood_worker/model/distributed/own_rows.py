"""Ranks that have rows of their own, and layers that all of them compute together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.group import Group


class OwnRows:
    """Takes rows from the ranks that have them to layers that are split over all ranks, and the layers' sums back.

    Each rank sends as many rows as the rank that has most; rows that only pad are not computed. Before the first
    :meth:`begin`, as where a graph is captured, every rank has as many.

    Args:
        group: The ranks.
        ops: The operations of the device where rows are.

    Attributes:
        seen: int64 [1]: a digest of the rows that this rank has computed layers for since :meth:`begin`; whoever takes them to a
            layer adds to it. They are all ranks' rows, so that it is the same on every rank, or one of them got others.
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
        """Tells how many rows each rank has in what is computed next; the host does not wait for the device."""
        self._told, self._places = True, None
        self.seen.zero_()
        self._counts = counts
        self._most, self._own = max(counts), counts[self._group.rank]

    def forget(self) -> None:
        """Makes it as before the first :meth:`begin`. Whoever builds a model does, as its graphs are captured with what is here;
        another model of the same ranks may have computed steps."""
        self._told, self._places = False, None

    def sizes(self, rows: int) -> tuple[int, int]:
        """How many of so many rows are this rank's own, and how many the rank has that has most."""
        return (self._own, self._most) if self._told else (rows, rows)

    def gather(self, x: Tensor) -> Tensor:
        """This rank's rows [T, W] -> all ranks' in their order, [sum of the counts, W]; rows beyond the own count stay here."""
        if not self._told:
            return self._group.gather_rows(x)
        every = self._group.gather_rows(F.pad(x[: self._own], (0, 0, 0, self._most - self._own)))
        return every if (filled := self._filled()) is None else every.index_select(0, filled)

    def scatter_sum(self, x: Tensor, rows: int) -> Tensor:
        """This rank's part of the sum for all rows, in the order of :meth:`gather` -> the sum for its own: [rows, W]."""
        if not self._told:
            return self._group.reduce_scatter(x)
        if (filled := self._filled()) is not None:
            x = x.new_zeros(self._most * self._group.size, x.shape[1]).index_copy_(0, filled, x)
        return F.pad(self._group.reduce_scatter(x)[: self._own], (0, 0, 0, rows - self._own))

    def _filled(self) -> Tensor | None:
        """int64 [sum of the counts]: which of all ranks' padded rows are rows; None: all. Made for the first layer that needs
        it: a step that replays a graph does not."""
        if self._places is None and min(self._counts) < self._most:
            places = [np.arange(count) + rank * self._most for rank, count in enumerate(self._counts)]
            self._places = self._ops.to_device(np.concatenate(places))
        return self._places


class PartialSums(Group):
    """A group whose ranks keep their parts of sums: whoever calls the layer takes them to the ranks that need them.

    Args:
        group: The ranks.
    """

    partial = True

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
