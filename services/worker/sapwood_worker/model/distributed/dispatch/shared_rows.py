"""Rows' ways between CPU processes of one host, over memory that they share."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.experts.payload import GROUP, RowShape, from_float8, to_float8
from sapwood_kernels.native.library import NativeLibrary
from sapwood_worker.model.distributed.expert_exchange import count
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.shared_parts import SharedMeeting


class SharedRows:
    """Implements :class:`~sapwood_worker.model.distributed.expert_exchange.RowWays`; made by all ranks together.

    The memory has one place for each row of each rank at each rank. They are written again without more ado: a rank that begins
    the next dispatch has met all others in this one's return, which they begin when their experts are done with the rows.

    Args:
        group: The ranks.
        shape: The rows.
        most_rows: Rows of a rank at a time, at most.
        library: The compiled library.
        seconds: Seconds after which a rank that does not come is an error.
    """

    def __init__(self, group: Group, shape: RowShape, most_rows: int, library: NativeLibrary, seconds: float) -> None:
        self.shape, self.most_rows = shape, most_rows
        self.moved = torch.zeros(2, dtype=torch.int64)
        self._rank, self._size = group.rank, group.size
        pairs = self._size, self._size, most_rows  # of a rank that gets a row, and the one whose row it is
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((self._size, most_rows, shape.chosen), torch.int64),
            ((self._size, most_rows, shape.chosen), torch.float32),
            (pairs, torch.bool),
            ((*pairs, shape.width), torch.float8_e4m3fn if shape.float8 else shape.dtype),
            ((*pairs, -(-shape.width // GROUP)), torch.uint8),
            ((*pairs, shape.width), shape.dtype),
        ]
        sizes = [-(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64 for shape, dtype in kinds]
        self._meeting = SharedMeeting(group, library, sum(sizes), seconds)
        parts = [
            part[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for part, (shape, dtype) in zip(torch.split(self._meeting.content, sizes), kinds, strict=True)
        ]
        self._ids, self._weights, self._came, self._rows, self._exponents, self._sums = parts

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, holders: Tensor, rows: int, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rank, own, shape = self._rank, len(x), self.shape
        self._ids[rank, :rows] = shape.experts
        self._ids[rank, :own] = ids
        self._weights[rank, :rows] = 0
        self._weights[rank, :own] = weights
        self._came[:, rank, :rows] = False
        codes, exponents = to_float8(x) if shape.float8 else (x, None)
        for target in range(self._size):
            mine = (holders == target).any(1).nonzero()[:, 0]
            self._came[target, rank, mine] = True
            self._rows[target, rank, mine] = codes[mine]
            if exponents is not None:
                self._exponents[target, rank, mine] = exponents[mine]
        self._meeting.wait()
        came = self._came[rank, :, :rows]
        found = x.new_empty(self._size, rows, shape.width)
        taken = self._rows[rank, :, :rows][came]
        found[came] = from_float8(taken, self._exponents[rank, :, :rows][came], x.dtype) if shape.float8 else taken
        every = self._ids[:, :rows].flatten(0, 1)
        count(every, counts)
        everywhere = self._came[:, :, :rows]
        self.moved[0] += everywhere.sum() - everywhere.diagonal().sum()
        self.moved[1] += (every < shape.experts).any(1).sum()
        return found.flatten(0, 1), every, self._weights[:, :rows].flatten(0, 1)

    def combine(self, part: Tensor, holders: Tensor, rows: int) -> Tensor:
        rank, parts = self._rank, part.view(self._size, rows, -1)
        for source in range(self._size):
            came = self._came[rank, source, :rows].nonzero()[:, 0]
            self._sums[source, rank, came] = parts[source, came]
        self._meeting.wait()
        total = torch.zeros(len(holders), self.shape.width)
        for target in range(self._size):
            here = (holders == target).any(1).nonzero()[:, 0]
            total[here] += self._sums[rank, target, here].float()
        return total.to(part.dtype)
