"""The registry of all-reduce methods besides torch's backend, by kind of device, and the choice among them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch

from sapwood_common.errors import ConfigError
from sapwood_kernels.native.products import load_library
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.distributed.all_reduce import AllReduce
from sapwood_worker.model.distributed.calibration import Trial, as_it_is, time_on_host
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.shared_memory_all_reduce import OneShot, SharedMemoryAllReduce, TwoShot
from sapwood_worker.model.distributed.torch_group import TorchGroup

logger = logging.getLogger(__name__)


def choose_sums(parallel: Parallel, name: str, device: torch.device, ranks_on_host: int, seconds: float) -> None:
    """Sets the all-reduce methods of a layer's ranks by ``name``; called by all ranks together, once.

    Args:
        parallel: The groups. Until now they sum with torch's backend.
        name: ``auto`` for the quickest method of each size, or the name of one method.
        device: Where the tensors are.
        ranks_on_host: How many ranks are on each host.
        seconds: Seconds to wait for a rank that does not join a sum; then it is an error.

    Raises:
        ConfigError: The method that ``name`` asks for cannot be used here.
    """
    group = parallel.tp
    if not isinstance(group, TorchGroup) or name == "backend":
        return
    if len({rank // ranks_on_host for rank in group.ranks}) > 1:
        if name != "auto":
            raise ConfigError(f"--all-reduce {name}: the ranks of a layer are on several hosts")
        return
    if (make := _CHOICES.get(device.type)) is not None:
        group.sums = make(group, name, device, seconds, parallel.rows is not None)
        if isinstance(parallel.ep, TorchGroup) and parallel.ep.ranks == group.ranks:
            parallel.ep.sums = group.sums


def _on_cpus(group: TorchGroup, name: str, device: torch.device, seconds: float, own_rows: bool) -> AllReduce:
    library = load_library()
    own = {}
    if all(group.exchange(library is not None and hasattr(os, "memfd_create"), bool)):
        assert library is not None
        parts = SharedMemoryAllReduce(group, library, seconds)
        own = {each.name: each(parts) for each in (OneShot, TwoShot)}
    else:
        logger.warning("all-reduce: no compiled library, or no memory that processes share: gloo sums")
    dtypes = (torch.float32, torch.bfloat16)
    trial = Trial(group, device_ops(device), dtypes, timer=time_on_host, replay=as_it_is)
    return trial.choose(name, group.backend, own, own_rows=own_rows)


def _on_gpus(group: TorchGroup, name: str, device: torch.device, seconds: float, own_rows: bool) -> AllReduce:
    from sapwood_worker.model.distributed import peer_all_reduce  # only CUDA builds of torch have triton

    made: list[peer_all_reduce.PeerSum] = []
    normed: list[peer_all_reduce.PeerNormedSum] = []
    try:
        made, normed = peer_all_reduce.make_peer_sums(group, device)
    except RuntimeError as error:
        logger.warning("all-reduce: ranks do not reach each other's memory, NCCL sums: %s", error)
    dtypes = (torch.bfloat16, torch.float32)
    trial = Trial(group, device_ops(device), dtypes, timer=peer_all_reduce.time_on_gpu, replay=peer_all_reduce.captured)
    table = trial.choose(name, group.backend, {each.name: each for each in made}, own_rows=own_rows)
    if not own_rows:
        trial.choose_normed(name, table, {each.name: each for each in normed})
    for each in (*made, *normed):  # from now on they wait without limit
        each.wait_forever()
    return table


_CHOICES: Mapping[str, Callable[[TorchGroup, str, torch.device, float, bool], AllReduce]] = {
    "cpu": _on_cpus,
    "cuda": _on_gpus,
}
