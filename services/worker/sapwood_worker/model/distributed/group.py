"""A group of ranks and its collective operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from sapwood_kernels.ops.contracts import Norm
from sapwood_worker.model.distributed.all_reduce import AllReduce
from sapwood_worker.model.distributed.overlap import Overlap
from sapwood_worker.records.model_info import OVERLAPPED, SumChoices

ValueT = TypeVar("ValueT")


class Group:
    """Ranks that compute together and all make the same calls in the same order. This class is a group of one rank.

    Layers read the size once, when they are built: in a group of one rank they call nothing.

    Attributes:
        rank: This process's place in the group, from 0.
        size: Ranks in the group.
        sums: How it sums tensors, where there is a choice.
        overlap: Sums long products and experts in chunks; None: they are summed whole.
        partial: True if :meth:`all_reduce` leaves each rank its part, and the layer's caller sums the parts.
    """

    rank: int = 0
    size: int = 1
    sums: AllReduce | None = None
    overlap: Overlap | None = None
    partial: bool = False

    @property
    def report(self) -> SumChoices:
        """The all-reduce methods, for operators."""
        if self.sums is None or self.overlap is None or not self.overlap.words:
            return SumChoices() if self.sums is None else self.sums.report
        report = self.sums.report
        return replace(report, words=f"{report.words}; beside {self.overlap.words}")

    def counts(self) -> dict[str, int]:
        """How often each method has summed, and how many of these sums ran during a product."""
        found = {} if self.sums is None else self.sums.counts()
        return found if self.overlap is None else found | {OVERLAPPED: self.overlap.summed}

    def waiting(self) -> AbstractContextManager[None]:
        """Marks an exchange of all ranks as running, for the watchdog."""
        return nullcontext()

    def rehearsing(self) -> AbstractContextManager[None]:
        """Within the block this rank runs layers alone, to see which kernels they launch: sums are left out, and other ranks'
        rows are undefined."""
        return nullcontext()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over the ranks, in place; returns x."""
        return x

    def add_sum(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        """Adds the sum of x over the ranks to the residual, in place; may overwrite x.

        Args:
            x: [T, N].
            residual: [T, N].
            norm: What comes next.

        Returns:
            [T, N]: the normed residual, if it was computed in the same pass; else None.
        """
        residual += self.all_reduce(x)
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors [..., N] side by side in their order: [..., size * N]."""
        return x

    def gather_rows(self, x: Tensor) -> Tensor:
        """The ranks' rows below each other in their order: [T, ...] -> [size * T, ...]."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks: [size * T, ...] -> [T, ...]."""
        return x

    def reduce(self, x: Tensor, target: int) -> Tensor:
        """Sums x over the ranks, in place, for the rank ``target``; on other ranks x is then undefined. Returns x."""
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrites x with that of the rank ``source``; returns x."""
        return x

    def send(self, x: Tensor, target: int) -> None:
        """Sends x to another rank, which receives in the order of sending; may return before that. The caller must not change x
        any more."""
        raise AssertionError("there is no other rank")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrites x with the next tensor from another rank; returns x."""
        raise AssertionError("there is no other rank")

    def connect(self, device: torch.device) -> None:
        """Sends a message from each rank to each other rank, so that all connections exist before later exchanges."""
        nothing = torch.zeros(1, device=device)
        for source in range(self.size):
            for target in range(self.size):
                if source != target and self.rank == source:
                    self.send(nothing, target)
                elif source != target and self.rank == target:
                    self.receive(torch.empty_like(nothing), source)

    def exchange(self, value: ValueT, kind: Any) -> list[ValueT]:
        """The ranks' values in their order. It is slow, for use at the start only.

        Args:
            value: This rank's.
            kind: The type of every rank's value: received data is checked against it and never executed.
        """
        return [value]
