"""A group of ranks and what it does together."""

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
    """Ranks that compute one thing together, all making the same calls in the same order. This class: a rank alone.

    Layers ask for the size once, when they are built: in a group of one rank nothing is called.

    Attributes:
        rank: This process's place in the group, from 0.
        size: Ranks in the group.
        sums: How it sums tensors, where there is a choice.
        overlap: Sums long products and experts in pieces; None: they are summed whole.
        partial: True if :meth:`all_reduce` leaves each rank its part, and the layer's caller sums the parts.
    """

    rank: int = 0
    size: int = 1
    sums: AllReduce | None = None
    overlap: Overlap | None = None
    partial: bool = False

    @property
    def report(self) -> SumChoices:
        """What sums tensors, for operators."""
        if self.sums is None or self.overlap is None or not self.overlap.words:
            return SumChoices() if self.sums is None else self.sums.report
        report = self.sums.report
        return replace(report, words=f"{report.words}; beside {self.overlap.words}")

    def counts(self) -> dict[str, int]:
        """How often each method has summed, and how many of these sums ran during a product."""
        found = {} if self.sums is None else self.sums.counts()
        return found if self.overlap is None else found | {OVERLAPPED: self.overlap.summed}

    def waiting(self) -> AbstractContextManager[None]:
        """While an exchange of all its ranks continues, which is shown to who watches them."""
        return nullcontext()

    def rehearsing(self) -> AbstractContextManager[None]:
        """While this rank goes through layers alone, to see what they launch: sums are left out, and rows of others undefined."""
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
            [T, N]: what the norm gives of the residual, where that was computed in the same pass; else None.
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
        """Sums x over the ranks, in place, for the rank ``target``; elsewhere x is undefined then. Returns x."""
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrites x with that of the rank ``source``; returns x."""
        return x

    def send(self, x: Tensor, target: int) -> None:
        """Hands x to another rank, which receives in the order of sending; may return before. x is not to be changed any more."""
        raise AssertionError("there is no other rank")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrites x with what another rank sends next; returns x."""
        raise AssertionError("there is no other rank")

    def connect(self, device: torch.device) -> None:
        """Sends something from each rank to each other, so that no later exchange has to make their connection first."""
        nothing = torch.zeros(1, device=device)
        for source in range(self.size):
            for target in range(self.size):
                if source != target and self.rank == source:
                    self.send(nothing, target)
                elif source != target and self.rank == target:
                    self.receive(torch.empty_like(nothing), source)

    def exchange(self, value: ValueT, kind: Any) -> list[ValueT]:
        """The ranks' values in their order; for the start: slow.

        Args:
            value: This rank's.
            kind: The type of every rank's: what comes is checked against it, and nothing of it is run.
        """
        return [value]
