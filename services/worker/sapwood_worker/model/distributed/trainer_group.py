"""Groups of torch.distributed that a trainer leads: it broadcasts tensors, and each rank of the worker receives them.

The trainer is rank 0, and makes the group as torch's own helper for further groups does (``init_custom_process_group`` of
OpenRLHF, slime and SGLang): a store at its address, with the group's name before each key. All ranks of the worker join, and
receive the same tensors in the same order, into files in shared memory, from which they are staged like any others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import save_file
from torch._C._distributed_c10d import PrefixStore, TCPStore

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_worker.records.weights import TensorSpec, TrainerGroup

_SECONDS = timedelta(seconds=300)
_SHARED = Path("/dev/shm")
_CPU = ("gloo",)


class TrainerGroups:
    """The groups that this rank is in, by name.

    Args:
        rank: This rank among the worker's.
        device: Where the worker computes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._groups: dict[str, tuple[Any, str]] = {}

    def join(self, group: TrainerGroup) -> None:
        """Joins a group; returns when all of its members have.

        Raises:
            InvalidArgumentError: This rank is in one of this name, or the group does not come to stand; says why.
        """
        if group.name in self._groups:
            raise InvalidArgumentError(f"this worker is in a group {group.name!r} already", field="group")
        rank = group.rank_offset + self._rank
        if not 0 < rank < group.world_size:
            raise InvalidArgumentError(
                f"rank_offset {group.rank_offset} gives rank {rank} of {group.world_size}", field="rank_offset"
            )
        try:
            store = TCPStore(group.address, group.port, group.world_size, False, _SECONDS)
            made, _ = c10d._new_process_group_helper(
                group.world_size,
                rank,
                [],
                group.backend,
                PrefixStore(group.name, store),
                group_name=cast(Any, group.name),  # older torch takes a str
                timeout=_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise InvalidArgumentError(
                f"group {group.name!r} does not come to stand: {error}", field="group"
            ) from error
        c10d._world.pg_group_ranks[made] = {each: each for each in range(group.world_size)}
        self._groups[group.name] = made, group.backend

    def leave(self, name: str) -> bool:
        """Leaves a group; returns whether this rank was in it."""
        found = self._groups.pop(name, None)
        if found is not None:
            torch.distributed.destroy_process_group(found[0])
        return found is not None

    @contextmanager
    def received(self, name: str, tensors: Sequence[TensorSpec]) -> Iterator[Path]:
        """Receives tensors from rank 0; within the block they lie in a safetensors file.

        Raises:
            NotFoundError: This rank is not in the group.
            InvalidArgumentError: A dtype is unknown, or the trainer has broken off.
        """
        if name not in self._groups:
            raise NotFoundError(f"this worker is in no group {name!r}", field="group")
        group, backend = self._groups[name]
        device = torch.device("cpu") if backend in _CPU else self._device
        found: dict[str, torch.Tensor] = {}
        for each in tensors:
            dtype = getattr(torch, each.dtype.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise InvalidArgumentError(f"tensor {each.name} has the unknown dtype {each.dtype!r}", field="tensors")
            tensor = torch.empty(each.shape, dtype=dtype, device=device)
            try:
                torch.distributed.broadcast(tensor, src=0, group=group)
            except RuntimeError as error:
                raise InvalidArgumentError(f"tensor {each.name} did not come: {error}", field="tensors") from error
            found[each.name] = tensor.cpu()
        with tempfile.TemporaryDirectory(
            prefix="sapwood-weights-", dir=_SHARED if _SHARED.is_dir() else None
        ) as folder:
            path = Path(folder) / "received.safetensors"
            save_file(found, path)
            yield path
