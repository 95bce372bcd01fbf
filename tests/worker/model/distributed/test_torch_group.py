"""What a rank on a CPU keeps of what it has sent to others, which may come for it late."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.distributed import own_rows
from sapwood_worker.model.distributed.own_rows import OwnRows
from sapwood_worker.model.distributed.torch_group import TorchGroup, join_groups

EXCHANGES: dict[str, Callable[[TorchGroup, Tensor], Tensor]] = {
    "reduce": lambda group, x: group.reduce(x, 0),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "gather_rows": lambda group, x: group.gather_rows(x),
    "all_gather": lambda group, x: group.all_gather(x),
}


def over_processes(rank: int, folder: Path) -> None:
    """A process: rank 0 sends, and both then exchange something."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    group = join_groups(rank, tensor=2, rendezvous=meeting, backend="gloo", timeout=60).tp
    assert isinstance(group, TorchGroup)
    for name, exchange in EXCHANGES.items():
        if rank == 0:
            sent = torch.full((500, 100), 3.0)  # more than a socket takes before someone reads
            seen = weakref.ref(sent)
            group.send(sent, 1)
            del sent
            assert seen() is not None, "the other may not have come for it"
        else:
            assert group.receive(torch.empty(500, 100), 0).unique().tolist() == [3.0]
        exchange(group, torch.ones(2, 2))
        assert rank == 1 or seen() is None, name
    own_rows._LEAST_SAVED = 0
    rows = OwnRows(group, device_ops("cpu"))
    rows.begin([40, 0])
    for _ in range(3):  # layers that a long prompt goes through, of which rank 1 has no rows
        every = rows.gather(torch.ones(40 if rank == 0 else 0, 8))
        assert rows.scatter_sum(every.clone(), 40 if rank == 0 else 0).sum() == (640 if rank == 0 else 0)
    assert not group._sent
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_what_all_ranks_have_received_is_not_kept(tmp_path: Path) -> None:
    multiprocessing.spawn(over_processes, (tmp_path,), nprocs=2)
