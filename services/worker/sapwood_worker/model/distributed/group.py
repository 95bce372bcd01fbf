"""A group of ranks and what it does together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks that compute one thing together. All of them make the same calls in the same order.

    In a group of one rank nothing is called: layers ask for ``size`` once, when they are built.
    """

    @property
    def rank(self) -> int:
        """This process's place in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over the ranks, in place; returns x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors [..., N] side by side in their order: a new tensor [..., size * N]."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks: [size * T, ...] -> a new tensor [T, ...]."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrites x with that of the rank ``source``; returns x."""
        ...


class Solo:
    """Implements :class:`Group` for one rank: nothing is exchanged."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x
