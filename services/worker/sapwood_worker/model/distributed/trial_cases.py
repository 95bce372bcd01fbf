"""Tensors by which methods that sum are tried: each tells what was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.all_reduce import NormedMethod, SumMethod, add_up
from sapwood_worker.model.distributed.group import Group

_COUNTS = (1, 1000, 100_003)
WIDTH = 4096
"""Numbers of a row that is normed: one, since a kernel is compiled for each."""
_ROWS = (1, 5, 70)
_EPS = 1e-6


class Case(Protocol):
    """A tensor for a method.

    Attributes:
        x: What the method sums; to be filled before each run.
    """

    x: Tensor

    def run(self) -> None:
        """Sums it."""
        ...

    def wrong(self, every: Tensor) -> str:
        """What the last run made wrong, given all ranks' tensors, [size, ...]; empty: nothing."""
        ...


class TrialNorm:
    """A norm as of a model's layers.

    Args:
        width: Numbers that are normed together.
        ops: The device's operations.
        dtype: Theirs.
    """

    eps = _EPS

    def __init__(self, width: int, ops: DeviceOps, dtype: torch.dtype) -> None:
        self.weight = torch.linspace(0.5, 1.5, width, device=ops.device)
        self._norm = ops.rms_norm(self.weight, self.eps, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x)


class _SumCase:
    def __init__(self, method: SumMethod, count: int, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        self.x = torch.empty(count, dtype=dtype, device=device)
        self._method, self._rank = method, rank
        self._every = self._own = torch.empty(0)

    def run(self) -> None:
        self._every = self._method.gather(self.x)
        self._own = self._method.scatter_sum((self._rank + 1) * self._every)[0]
        self._method.sum(self.x)

    def wrong(self, every: Tensor) -> str:
        own, whole = torch.empty_like(self.x), torch.empty_like(self.x)
        add_up([(rank + 1) * every[self._rank] for rank in range(len(every))], own)
        add_up(every.unbind(), whole)
        found = {"gathering": (self._every, every), "sum of own rows": (self._own, own), "sum": (self.x, whole)}
        return next((name for name, (ours, right) in found.items() if not torch.equal(ours, right)), "")


class _NormedCase:
    def __init__(self, method: NormedMethod, shape: tuple[int, int], dtype: torch.dtype, ops: DeviceOps) -> None:
        self._matrix = torch.empty(shape, dtype=dtype, device=ops.device)
        self.x = self._matrix.view(-1)
        self._before = torch.linspace(-2, 2, len(self.x), device=ops.device).view(shape).to(dtype)
        self._residual = torch.empty_like(self._before)
        self._normed: Tensor | None = None
        self._method, self._norm = method, TrialNorm(shape[1], ops, dtype)

    @property
    def taken(self) -> bool:
        """Whether the method takes it."""
        return self._method.takes(self._matrix, self._residual)

    def run(self) -> None:
        self._residual.copy_(self._before)
        self._normed = self._method.add(self._matrix, self._residual, self._norm)

    def wrong(self, every: Tensor) -> str:
        summed = torch.empty_like(self.x)
        add_up(every.unbind(), summed)
        expected = self._before + summed.view_as(self._before)
        if not torch.equal(self._residual, expected):
            return "sum with a residual"
        most = 2 * torch.finfo(summed.dtype).eps  # means may be added up in another order
        right = self._normed is not None and torch.allclose(
            self._normed.float(), self._norm(expected).float(), rtol=most, atol=most
        )
        return "" if right else "norm"


def sum_cases(method: SumMethod, dtype: torch.dtype, ops: DeviceOps, group: Group) -> Iterator[Case]:
    """Tensors of several sizes that a method takes."""
    for count in _COUNTS:
        if group.size * count * dtype.itemsize <= method.most_bytes:
            yield _SumCase(method, count, dtype, ops.device, group.rank)


def normed_cases(method: NormedMethod, dtype: torch.dtype, ops: DeviceOps, group: Group) -> Iterator[Case]:
    """Tensors of several sizes that a method takes which also adds a residual and norms."""
    cases = (_NormedCase(method, (rows, WIDTH), dtype, ops) for rows in _ROWS)
    yield from (case for case in cases if case.taken)
