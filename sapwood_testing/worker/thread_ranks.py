"""Ranks as threads of one process, for tests of what is split over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from sapwood_worker.model.distributed.group import Group

ResultT = TypeVar("ResultT")


class ThreadGroup(Group):
    """Threads that share a list.

    Args:
        rank: The thread's rank.
        shared: A place for each rank's tensor.
        barrier: Of all ranks.
        values: A place for each rank's plain values.

    Attributes:
        calls: How often ranks have exchanged something.
    """

    def __init__(
        self, rank: int, shared: list[Tensor], barrier: threading.Barrier, values: list[Any] | None = None
    ) -> None:
        self.rank = rank
        self.size = len(shared)
        self.calls = 0
        self._shared = shared
        self._barrier = barrier
        self._values = [None] if values is None else values

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x).unbind(), -1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._exchange(x).sum(0).chunk(self.size)[self.rank].clone()

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._exchange(x)[source])

    def exchange(self, value: ResultT) -> list[ResultT]:
        self._values[self.rank] = value
        self._barrier.wait(timeout=60)
        found = list(self._values)
        self._barrier.wait(timeout=60)
        return found

    def _exchange(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._shared[self.rank] = x
        self._barrier.wait(timeout=60)
        parts = torch.stack(self._shared)  # a copy: the ranks may change theirs once all have taken it
        self._barrier.wait(timeout=60)
        return parts


def run_ranks(size: int, work: Callable[[ThreadGroup], ResultT]) -> list[ResultT]:
    """What ``work`` returns for each rank of a group; raises what made a rank fail first."""
    shared, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    values: list[Any] = [None] * size

    def one(rank: int) -> ResultT:
        try:
            with torch.inference_mode():
                return work(ThreadGroup(rank, shared, barrier, values))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as executor:
        done = [executor.submit(one, rank) for rank in range(size)]
    failed = [error for each in done if (error := each.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in done]
