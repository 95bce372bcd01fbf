"""What a rank on a CPU keeps of what it has sent to others, which may come for it late."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.distributed import data_parallel, torch_group
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.torch_group import TorchGroup, join_groups
from sapwood_worker.model.pools.device_pool import KVScales
from sapwood_worker.model.sizes import Sizes

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
    data_parallel._LEAST_SAVED = 0
    rows = DataParallelRows(group, device_ops("cpu"))
    rows.begin([40, 0])
    for _ in range(3):  # layers that a long prompt goes through, of which rank 1 has no rows
        every = rows.gather(torch.ones(40 if rank == 0 else 0, 8))
        assert rows.scatter_sum(every.clone(), 40 if rank == 0 else 0).sum() == (640 if rank == 0 else 0)
    assert not group._sent
    torch.distributed.destroy_process_group()


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def exchange_values(rank: int, folder: Path) -> None:
    """A process: exchanges plain values, and then rank 1 sends what is none."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    group = join_groups(rank, tensor=2, rendezvous=meeting, backend="gloo", timeout=60).tp
    assert isinstance(group, TorchGroup)
    assert group.exchange(rank, int) == [0, 1]
    assert group.exchange("x" * (3000 * rank), str) == ["", "x" * 3000]
    assert group.exchange((b"\xff", rank, None), tuple[bytes, int, None]) == [(b"\xff", 0, None), (b"\xff", 1, None)]
    sizes = Sizes(rank, 2, None, ("a", "b"))
    assert group.exchange(sizes if rank else None, Sizes | None) == [None, Sizes(1, 2, None, ("a", "b"))]
    scales = KVScales((0.1, 2.0), (float(rank), 4.0))
    assert group.exchange(scales, KVScales)[rank] == scales
    for said in (pickle.dumps(Trap(folder / "sprung")), b"\xc1"):
        if rank:
            with patch.object(msgspec.msgpack, "encode", lambda value, said=said: said), pytest.raises(ConfigError):
                group.exchange("", str)
        else:
            with pytest.raises(ConfigError, match="exchanges something else"):
                group.exchange("", str)
    with patch.object(torch_group, "_MOST_EXCHANGED", 10), pytest.raises(ConfigError, match="exchanges 28 bytes"):
        group.exchange("x" * 27, str)
    torch.distributed.destroy_process_group()


def test_ranks_exchange_plain_values_and_unpickle_nothing(tmp_path: Path) -> None:
    multiprocessing.spawn(exchange_values, (tmp_path,), nprocs=2)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.slow
def test_what_all_ranks_have_received_is_not_kept(tmp_path: Path) -> None:
    multiprocessing.spawn(over_processes, (tmp_path,), nprocs=2)
