"""Groups of processes, by ``torch.distributed``: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel


class TorchGroup(Group):
    """Processes.

    Args:
        ranks: Its ranks among all, in order; this process is one of them.
        group: torch's handle of the group.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        self._ranks = ranks
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=self._group)
        return torch.cat(parts.unbind(), -1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        result = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(result, x.contiguous(), group=self._group)
        return result

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, self._ranks[source], group=self._group)
        return x


def grid(tensor: int, pipeline: int, data: int, expert: int) -> dict[str, list[list[int]]]:
    """The ranks of every group, by kind: ``tp``, ``pp``, ``dp`` and ``ep``.

    Ranks of a tensor-parallel group, which talk most, are neighbours; then stages of a pipeline; then data-parallel copies. An
    expert-parallel group is ``expert`` ranks of one stage, in order.
    """
    ranks = torch.arange(tensor * pipeline * data).view(data, pipeline, tensor)
    return {
        "tp": ranks.reshape(-1, tensor).tolist(),
        "pp": ranks.transpose(1, 2).reshape(-1, pipeline).tolist(),
        "dp": ranks.permute(1, 2, 0).reshape(-1, data).tolist(),
        "ep": ranks.transpose(0, 1).reshape(-1, expert).tolist(),
    }


def join_groups(
    rank: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    expert: int = 1,
    rendezvous: str,
    backend: str,
    timeout: float,
) -> Parallel:
    """Meets the other ranks, ``tensor * pipeline * data`` in all, and forms the groups; torch's default group is the world.

    Args:
        rank: This process's, among all.
        tensor: Ranks of a tensor-parallel group.
        pipeline: Stages of a pipeline.
        data: Data-parallel copies.
        expert: Ranks of an expert-parallel group; divides ``data * tensor``.
        rendezvous: Where they meet: ``tcp://HOST:PORT``, which rank 0 serves, or ``file://PATH``.
        backend: ``nccl`` or ``gloo``.
        timeout: Seconds for the meeting and for each exchange.

    Raises:
        ConfigError: The sizes do not fit, or the others did not come in time.
    """
    world = tensor * pipeline * data
    if not 0 <= rank < world or data * tensor % expert:
        sizes = f"tensor {tensor} x pipeline {pipeline} x data {data}, expert {expert}"
        raise ConfigError(f"rank {rank} of {sizes}: the sizes do not fit")
    if world == 1:
        return Parallel()
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"rank {rank} of {world} did not meet the others at {rendezvous}: {error}") from error
    found: dict[str, Group] = {}
    for kind, groups in grid(tensor, pipeline, data, expert).items():
        for ranks in groups:
            made = dist.new_group(ranks, timeout=limit) if len(ranks) > 1 else None  # by all ranks, in this order
            if rank in ranks:
                found[kind] = Group() if made is None else TorchGroup(ranks, made)
    return Parallel(**found)
