"""Ranks with rows of their own: what is told of a step's rows, and how long it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.thread_ranks import run_grid
from sapwood_worker.model.distributed.own_rows import OwnRows
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.memory.trial_step import compute_trial
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

OPTIONS: dict[str, Any] = {"num_pages": 8, "max_running": 4, "page_size": 16}


def trial(runner: ModelRunner) -> Tensor:
    """What the layers make of three tokens."""
    return compute_trial([3], runner._model, runner._pool, runner._backend, runner.ops)


def test_a_model_is_built_whatever_rows_another_had_last(tiny_model: Any, make_runner: Any) -> None:
    """Its graphs would be captured with those rows, and read the places that were theirs."""
    path = tiny_model("llama", **SHAPE).path
    alone = trial(make_runner(path, **OPTIONS))

    def work(rank: int, parallel: Parallel) -> Tensor:
        rows = OwnRows(parallel.tp, torch.device("cpu"))
        rows.begin([2, 0])
        return trial(
            build_runner(RunnerOptions(model_path=path, threads=1, parallel=replace(parallel, rows=rows), **OPTIONS))
        )

    for each in run_grid(2, 1, work):
        torch.testing.assert_close(each, alone, atol=1e-5, rtol=1e-5)
