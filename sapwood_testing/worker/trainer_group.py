"""A trainer's side of a group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

_SECONDS = timedelta(seconds=60)


def lead_group(port: int, size: int, name: str) -> Any:
    """Makes a group as trainers do; this process is its rank 0. Returns when all have come.

    Args:
        port: Where its store listens.
        size: Its ranks.
        name: What it is called; used once in a process.
    """
    store, _, _ = next(iter(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=_SECONDS)))
    made, _ = c10d._new_process_group_helper(
        size, 0, [], "gloo", PrefixStore(name, store), group_name=c10d.GroupName(name), timeout=_SECONDS
    )
    c10d._world.pg_group_ranks[made] = {each: each for each in range(size)}
    return made
