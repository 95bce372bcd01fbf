"""Several steps under way in stages whose devices compute by themselves, as GPUs do: what they would queue is computed at once,
in the order in which it would be, by graphs or without. Answers are those of one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sapwood_kernels.ops.cpu import CpuOps
from sapwood_testing.worker.eager_graphs import with_graphs
from sapwood_testing.worker.ranks.asked_at_once import answers
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.model.distributed.pipeline import MicroBatches
from sapwood_worker.model.runner import builder, overlap_trial
from sapwood_worker.model.runner.model_runner import ModelRunner


@pytest.mark.parametrize(
    ("size", "stages", "name", "graphed"),
    [
        *((1, 2, "llama", True), (2, 2, "llama-biased-tied", True), (1, 3, "llama", True), (1, 2, "deepseek-v3", True)),
        *((1, 2, "gemma3", False), (2, 2, "llama", False)),
    ],
)
def test_stages_that_compute_by_themselves_answer_as_one_process_does(
    tiny_model: Any, make_runner: Any, monkeypatch: Any, size: int, stages: int, name: str, graphed: bool
) -> None:
    path = tiny_model(name, num_hidden_layers=3, **SHAPE).path
    options = {"num_pages": 40, "max_running": 9, "page_size": 16}
    alone = answers(make_runner(path, **options))
    monkeypatch.setattr(builder, "measured", lambda parallel, *_: MicroBatches(parallel.pp.size, 1e-9, 1.0))
    monkeypatch.setattr(overlap_trial, "_GAIN", float("inf"))
    monkeypatch.setattr(CpuOps, "asynchronous", True)
    overtaken: list[int] = []

    lock = threading.Lock()

    def prepare(runner: ModelRunner) -> None:
        if graphed:
            with lock:  # it patches torch for as long as it takes
                with_graphs(runner, (1, 2, 4, 9))
        assert (runner.info.micro_batches, runner.info.micro_batches_from) == (stages, 9 // 2 if stages == 3 else 2)

    def work(runner: Any) -> Any:
        found = answers(runner)
        overtaken.append(runner._runner.deferred.overtaken)
        return found

    group = run_group(size, path, work, stages=stages, prepare=prepare, **options)
    for mine, theirs in zip(group, alone, strict=True):
        mine.assert_is(theirs)
    assert overtaken[0] > 10
