"""Ranks as threads of one process, for tests of what is split over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.notes import StoreNotes
from sapwood_worker.model.distributed.parallel import Parallel

ResultT = TypeVar("ResultT")


class ThreadGroup(Group):
    """Threads that share a list.

    Args:
        rank: The thread's rank.
        shared: A place for each rank's tensor.
        barrier: Of all ranks.
        values: A place for each rank's plain values.
        sent: What one rank has sent to another and that has not received it.

    Attributes:
        calls: How often ranks have exchanged something.
    """

    def __init__(
        self,
        rank: int,
        shared: list[Tensor],
        barrier: threading.Barrier,
        values: list[Any] | None = None,
        sent: Mapping[tuple[int, int], SimpleQueue[Tensor]] | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(shared)
        self.calls = 0
        self._shared = shared
        self._barrier = barrier
        self._values = [None] if values is None else values
        self._sent = {} if sent is None else sent

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x).unbind(), -1)

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x).unbind())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._exchange(x).sum(0).chunk(self.size)[self.rank].clone()

    def reduce(self, x: Tensor, target: int) -> Tensor:
        found = self._exchange(x).sum(0)
        return x.copy_(found) if self.rank == target else x.fill_(float("nan"))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        if self.rank != source:
            return self.receive(x, source)
        for target in range(self.size):
            if target != source:
                self._sent[source, target].put(x.clone())
        self.calls += 1
        return x

    def send(self, x: Tensor, target: int) -> None:
        self.calls += 1
        self._sent[self.rank, target].put(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        self.calls += 1
        return x.copy_(self._sent[source, self.rank].get(timeout=60))

    def exchange(self, value: ResultT, kind: Any) -> list[ResultT]:
        self._values[self.rank] = msgspec.msgpack.encode(value)  # as processes do
        self._barrier.wait(timeout=60)
        found = [msgspec.msgpack.decode(cast(bytes, each), type=kind) for each in self._values]
        self._barrier.wait(timeout=60)
        return found

    def abort(self) -> None:
        """Ends the others' waiting for each other."""
        self._barrier.abort()

    def _exchange(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._shared[self.rank] = x
        self._barrier.wait(timeout=60)
        parts = torch.stack(self._shared)  # a copy: the ranks may change theirs once all have taken it
        self._barrier.wait(timeout=60)
        return parts


def make_groups(size: int) -> list[ThreadGroup]:
    """A group's ranks."""
    shared, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    values: list[Any] = [None] * size
    sent = {(source, target): SimpleQueue[Tensor]() for source in range(size) for target in range(size)}
    return [ThreadGroup(rank, shared, barrier, values, sent) for rank in range(size)]


def run_ranks(size: int, work: Callable[[ThreadGroup], ResultT]) -> list[ResultT]:
    """What ``work`` returns for each rank of a group; raises what made a rank fail first."""
    groups = make_groups(size)
    return _run([partial(work, group) for group in groups], groups)


def run_grid(tensor: int, pipeline: int, work: Callable[[int, Parallel], ResultT]) -> list[ResultT]:
    """What ``work`` returns for each rank of a pipeline's stages, given its number and groups; raises likewise."""
    stages = [make_groups(tensor) for _ in range(pipeline)]
    pipes = [make_groups(pipeline) for _ in range(tensor)]
    store = HashStore()
    ranks = [
        Parallel(
            tp=stages[stage][part] if tensor > 1 else Group(),
            pp=pipes[part][stage] if pipeline > 1 else Group(),
            notes=StoreNotes(store, stage * tensor + part, tensor * pipeline),
        )
        for stage in range(pipeline)
        for part in range(tensor)
    ]
    every = [group for groups in (*stages, *pipes) for group in groups]
    return _run([partial(work, rank, each) for rank, each in enumerate(ranks)], every)


def _run(jobs: Sequence[Callable[[], ResultT]], groups: Sequence[ThreadGroup]) -> list[ResultT]:
    def one(job: Callable[[], ResultT]) -> ResultT:
        try:
            with torch.inference_mode():
                return job()
        except BaseException:
            for group in groups:
                group.abort()
            raise

    with ThreadPoolExecutor(len(jobs)) as executor:
        done = [executor.submit(one, job) for job in jobs]
    failed = [error for each in done if (error := each.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError | Empty)):
        raise error
    return [each.result() for each in done]
