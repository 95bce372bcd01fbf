"""Ranks that have rows of their own: what the host has to do for a step, and whether it waits for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_grid, run_ranks
from sapwood_worker.model.distributed import data_parallel
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.memory import compute_trial
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions


class CountingOps(DeviceOps):
    """Attributes: copied: Arrays that were copied to the device."""

    copied = 0

    def to_device(self, array: np.ndarray) -> Tensor:
        self.copied += 1
        return super().to_device(array)


@pytest.mark.parametrize("counts", [(3, 0, 5), (4, 4, 4), (0, 1, 0)])
def test_places_of_rows_are_copied_once_for_the_first_layer_that_needs_them(counts: tuple[int, ...]) -> None:
    def work(group: ThreadGroup) -> list[int]:
        ops = CountingOps(torch.device("cpu"))
        rows = DataParallelRows(group, ops)
        copied = []
        for _ in range(2):
            rows.begin(counts)
            copied.append(ops.copied)  # a step that replays a graph needs none
            own = torch.full((counts[group.rank] + 2, 8), 1.0 + group.rank)  # two rows pad it
            for _ in range(3):
                every = rows.gather(own)
                assert every[:, 0].tolist() == [1.0 + rank for rank, count in enumerate(counts) for _ in range(count)]
                found = rows.scatter_sum(every * (1 + group.rank), len(own))
                assert (found[: counts[group.rank]] == 6.0 + 6.0 * group.rank).all()
                assert not found[counts[group.rank] :].any()
            copied.append(ops.copied)
        return copied

    uneven = int(min(counts) < max(counts))
    assert run_ranks(3, work) == [[0, uneven, uneven, 2 * uneven]] * 3


@pytest.mark.parametrize("counts", [(0, 5, 0, 0), (6, 0, 1, 0), (6, 6, 6, 0), (4, 4, 4, 4), (5, 5, 5, 4)])
def test_few_ranks_with_many_rows_send_them_one_by_one(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(data_parallel, "_LEAST_SAVED", 8 * 4)  # a row for each rank that has some

    def work(group: ThreadGroup) -> tuple[int, int]:
        rows = DataParallelRows(group, CountingOps(torch.device("cpu")))
        rows.begin(counts)
        own = torch.arange(8 * (counts[group.rank] + 1.0)).view(-1, 8) + 1000 * group.rank  # one row pads it
        every = rows.gather(own)
        theirs = [
            row + 1000 * rank for rank, count in enumerate(counts) for row in torch.arange(8.0 * count).view(-1, 8)
        ]
        assert torch.equal(every, torch.stack(theirs))
        gathered = group.calls
        mine = every[sum(counts[: group.rank]) :][: counts[group.rank]]
        expected = mine.clone() * 10
        found = rows.scatter_sum(every * (1 + group.rank), len(own))
        assert torch.equal(found[:-1], expected)
        assert not found[-1].any()
        assert torch.equal(own, torch.arange(8 * (counts[group.rank] + 1.0)).view(-1, 8) + 1000 * group.rank)
        return gathered, group.calls

    senders = sum(count > 0 for count in counts)
    apart = senders < 4
    found = run_ranks(4, work)
    assert sum(last - first for first, last in found) == 4 * (senders if apart else 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_host_does_not_wait_for_the_gpu() -> None:
    class Alone(Group):
        size = 2

        def gather_rows(self, x: Tensor) -> Tensor:
            return torch.cat((x, x))

        def reduce_scatter(self, x: Tensor) -> Tensor:
            return x[: len(x) // 2]

    rows = DataParallelRows(Alone(), device_ops("cuda"))
    x = torch.ones(3, 8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows.begin([3, 1])
        rows.scatter_sum(rows.gather(x), 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


OPTIONS: dict[str, Any] = {"num_pages": 8, "max_running": 4, "page_size": 16}


def trial(runner: ModelRunner) -> Tensor:
    """What the layers make of three tokens."""
    return compute_trial([3], runner._model, runner._pool, runner._backend, runner.ops)


def test_a_model_is_built_whatever_rows_another_had_last(tiny_model: Any, make_runner: Any) -> None:
    """Its graphs would be captured with those rows, and read the places that were theirs."""
    path = tiny_model("llama", **SHAPE).path
    alone = trial(make_runner(path, **OPTIONS))

    def work(rank: int, parallel: Parallel) -> Tensor:
        rows = DataParallelRows(parallel.tp, device_ops("cpu"))
        rows.begin([2, 0])
        return trial(
            build_runner(RunnerOptions(model_path=path, threads=1, parallel=replace(parallel, rows=rows), **OPTIONS))
        )

    for each in run_grid(2, 1, work):
        torch.testing.assert_close(each, alone, atol=1e-5, rtol=1e-5)
