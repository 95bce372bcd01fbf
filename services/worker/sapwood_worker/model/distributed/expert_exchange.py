"""All-to-all for experts: each rank has rows and experts of its own, and rows are sent only to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.experts.payload import RowShape
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.group import Group


class RowWays(Protocol):
    """Sends rows to ranks and returns their sums; all ranks make the same calls in the same order.

    Attributes:
        shape: The rows.
        most_rows: Rows of a rank at a time, at most.
        moved: int64 [2]: how many rows all ranks have sent to others, counted once for each receiving rank, and how many rows all
            ranks had.
    """

    shape: RowShape
    most_rows: int
    moved: Tensor

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, holders: Tensor, rows: int, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sends rows to the ranks that have their experts.

        Args:
            x: [T, N].
            ids: Integers [T, k]: their experts, E for none.
            weights: float32 [T, k].
            holders: Integers [T, k]: the ranks that have them; the number of ranks for none.
            rows: The rows of the rank that has most, the same number on all ranks; at most :attr:`most_rows`.
            counts: int64 [E]: the number of rows that each expert gets from all ranks is added. Returns: For ``rows`` of each
            rank, rank after rank: the row, undefined if none of its experts is on this rank; its experts, E for none; their
                weights, float32.
        """
        ...

    def combine(self, part: Tensor, holders: Tensor, rows: int) -> Tensor:
        """Sends the experts' outputs back to the rows' ranks.

        Args:
            part: [ranks * rows, N]: the output of this rank's experts for each received row.
            holders, rows: As for :meth:`dispatch`.

        Returns:
            [T, N]: the sums for this rank's own rows, added up in the order of the ranks in float32 and rounded once.
        """
        ...


class ExpertExchange:
    """Computes this rank's rows with the experts of all ranks. A large batch goes to all ranks, because all ranks would get most
    of its rows anyway.

    Args:
        group: The ranks.
        rows: What each rank has.
        ways: Take few rows.
        ops: The device's operations.

    Attributes:
        moved: As the ways have it.
        told: The host's copy of the counts, at the last read.
    """

    def __init__(self, group: Group, rows: DataParallelRows, ways: RowWays, ops: DeviceOps) -> None:
        self._group, self._rows, self._ways, self._ops = group, rows, ways, ops
        self.moved, self.told = ways.moved, [0, 0]

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor], Tensor],
        holders: Callable[[Tensor, int], Tensor],
        counts: Tensor,
    ) -> Tensor:
        """The sums of rows' experts.

        Args:
            x: [T, N]: this rank's rows; rows beyond its own are padding, and their results are undefined.
            ids: Integers [T, k]: what the router chose.
            weights: float32 [T, k].
            experts: This rank's experts: take rows, their experts and weights, and return this rank's part of each row's sum.
            holders: Takes rows' experts and the index of the first row among all ranks' rows; returns the ranks that have these
                experts.
            counts: int64 [E]: what each expert gets from all ranks is added.

        Returns:
            [T, N].
        """
        own, most = self._rows.sizes(len(x))
        if most > self._ways.most_rows:
            every, chosen = self._rows.gather(x), self._rows.gather(ids)
            self._ops.add_digest(every, self._rows.seen)
            count(chosen, counts)
            return self._rows.scatter_sum(experts(every, chosen, self._rows.gather(weights)), len(x))
        where = holders(ids[:own], self._group.rank * most)
        sent = self._ways.dispatch(x[:own].contiguous(), ids[:own], weights[:own], where, most, counts)
        # The weights of all rows, on all ranks; padded to whole words of 8 bytes.
        self._ops.add_digest(sent[2].double(), self._rows.seen)
        return F.pad(self._ways.combine(experts(*sent), where, most), (0, 0, 0, len(x) - own))

    def exchanged_bytes(self, tokens: int) -> int:
        """Bytes of rows and sums that all ranks had sent each other at the last read of :attr:`told`.

        Args:
            tokens: How many tokens all experts of all layers had got at that time.
        """
        shape = self._ways.shape
        sent, rows = self.told
        gathered = tokens // shape.chosen - rows
        return int(sent * (shape.row_bytes + shape.sum_bytes) + 2 * gathered * (self._group.size - 1) * shape.sum_bytes)

    def forget(self) -> None:
        """Sets the counts to zero."""
        self.moved.zero_()


def count(ids: Tensor, counts: Tensor) -> None:
    """Adds to int64 [E] how often each expert is there; ids may be E, for none."""
    flat = ids.flatten().long()
    here = flat < len(counts)
    counts.scatter_add_(0, flat.where(here, 0), here.long())
