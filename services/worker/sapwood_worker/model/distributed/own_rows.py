"""Ranks that have rows of their own, and layers that all of them compute together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_worker.model.distributed.group import Group


class OwnRows:
    """Takes rows from the ranks that have them to layers that are split over all ranks, and the layers' sums back.

    Each rank sends as many rows as the one that has most; those that pad them are left out of what is computed. Before the first
    :meth:`begin`, as where a graph is captured, every rank has as many.

    Args:
        group: The ranks.
        device: Where rows are.

    Attributes:
        seen: int64 [1]: a digest of the rows that this rank has computed layers for since :meth:`begin`; whoever takes them to a
            layer adds to it. They are all ranks' rows, so that it is the same on every rank, or one of them got others.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.seen = torch.zeros(1, dtype=torch.int64, device=device)
        self._group = group
        self._counts: Sequence[int] = ()
        self._most = self._own = 0
        self._places: Tensor | None = None

    def begin(self, counts: Sequence[int]) -> None:
        """Tells how many rows each rank has in what is computed next."""
        self._counts, self._places = counts, None
        self._most, self._own = max(counts), counts[self._group.rank]
        self.seen.zero_()

    def forget(self) -> None:
        """Makes it as before the first :meth:`begin`. Whoever builds a model does, as its graphs are captured with what is here;
        another model of the same ranks may have computed steps."""
        self._counts, self._places = (), None

    def sizes(self, rows: int) -> tuple[int, int]:
        """How many of so many rows are this rank's own, and how many the rank has that has most."""
        return (self._own, self._most) if self._counts else (rows, rows)

    def gather(self, x: Tensor) -> Tensor:
        """This rank's rows [T, W] -> all ranks' in their order, [sum of the counts, W]; rows beyond the own count stay here."""
        if not self._counts:
            return self._group.gather_rows(x)
        every = self._group.gather_rows(F.pad(x[: self._own], (0, 0, 0, self._most - self._own)))
        return every if self._even else every.index_select(0, self._filled())

    def scatter_sum(self, x: Tensor, rows: int) -> Tensor:
        """This rank's part of the sum for all rows, in the order of :meth:`gather` -> the sum for its own: [rows, W]."""
        if not self._counts:
            return self._group.reduce_scatter(x)
        if not self._even:
            x = x.new_zeros(self._most * self._group.size, x.shape[1]).index_copy_(0, self._filled(), x)
        return F.pad(self._group.reduce_scatter(x)[: self._own], (0, 0, 0, rows - self._own))

    @property
    def _even(self) -> bool:
        """Whether every rank has as many rows."""
        return min(self._counts) == self._most

    def _filled(self) -> Tensor:
        """int64 [sum of the counts]: the places of rows among all that are sent. They are made when a layer first asks, as the
        layers in a graph never do, and copied while the device computes what was queued before."""
        if self._places is None:
            places = [rank * self._most + row for rank, count in enumerate(self._counts) for row in range(count)]
            on_host = torch.tensor(places)
            if self.seen.is_cuda:
                on_host = on_host.pin_memory()
            self._places = on_host.to(self.seen.device, non_blocking=True)
        return self._places


class PartialSums(Group):
    """A group whose ranks keep their parts of sums: whoever calls the layer takes them to the ranks that need them.

    Args:
        group: The ranks.
    """

    partial = True

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
