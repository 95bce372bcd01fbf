"""Whether stages compute several steps at once is chosen by a trial, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_kernels.ops.cpu import CpuOps
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.thread_ranks import run_grid
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.runner import overlap_trial
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.model.runner.overlap_trial import DecodeTrial

SECONDS = {1: {8: 3.0, 4: 3.0, 2: 1.0}, 2: {8: 1.5, 4: 2.0, 2: 2.0}}
"""Of a token of each request, by shares and by how many requests there are."""


@pytest.fixture
def chosen(tiny_model: Any, monkeypatch: Any) -> Any:
    """Chooses: micro_batches, and from how many requests on, of each of two stages' two ranks."""
    monkeypatch.setattr(CpuOps, "asynchronous", True)
    path = tiny_model("llama", num_hidden_layers=2, **SHAPE).path

    def choose(**options: Any) -> list[tuple[int, int]]:
        def one(rank: int, parallel: Parallel) -> tuple[int, int]:
            sizes: Any = {"num_pages": 40, "max_running": 8, "threads": 1}
            info = build_runner(RunnerOptions(model_path=path, parallel=parallel, **sizes, **options)).info
            return info.micro_batches, info.micro_batches_from

        return run_grid(2, 2, one)

    return choose


def slower_on(monkeypatch: Any, stage: int, times: float) -> None:
    """Has trials take :data:`SECONDS`, or in a stage so many times as long with several shares."""

    def seconds(self: DecodeTrial, shares: int) -> float:
        runner: Any = self._runner
        slow = times if shares > 1 and runner._model.link.first == (stage == 0) else 1.0
        return slow * SECONDS[shares][len(self._rows)]

    monkeypatch.setattr(DecodeTrial, "seconds", seconds)


def test_steps_are_under_way_at_once_from_as_many_requests_on_as_that_pays_for(chosen: Any, monkeypatch: Any) -> None:
    slower_on(monkeypatch, 0, 1.0)
    assert chosen() == [(2, 4)] * 4


def test_where_it_does_not_pay_in_one_stage_all_compute_one_step_after_another(
    chosen: Any, monkeypatch: Any, caplog: Any
) -> None:
    slower_on(monkeypatch, 1, 2.0)
    caplog.set_level("INFO")
    assert chosen() == [(1, 1)] * 4
    assert "one at a time" in caplog.text
    assert chosen(micro_batches="always") == [(2, 2)] * 4
    assert chosen(micro_batches="off") == [(1, 1)] * 4


def test_where_concurrent_steps_differ_in_one_stage_all_stages_run_in_sequence(
    chosen: Any, monkeypatch: Any, caplog: Any
) -> None:
    tokens = DecodeTrial.tokens

    def wrong(self: DecodeTrial, shares: int, *, apart: bool = False) -> list[list[int]]:
        found, runner = tokens(self, shares, apart=apart), self._runner
        own: Any = runner._model
        return [] if own.link.last and not apart else found

    monkeypatch.setattr(DecodeTrial, "tokens", wrong)
    assert chosen(micro_batches="always") == [(1, 1)] * 4
    assert "other tokens" in caplog.text


def test_the_trial_decodes_the_same_at_once_as_apart_and_overtakes_then_only(tiny_model: Any, monkeypatch: Any) -> None:
    path = tiny_model("llama", num_hidden_layers=2, **SHAPE).path
    monkeypatch.setattr(overlap_trial, "_ROUNDS", 6)

    def one(rank: int, parallel: Parallel) -> tuple[Any, ...]:
        sizes: Any = {"num_pages": 40, "max_running": 8, "threads": 1}
        runner: ModelRunner = build_runner(RunnerOptions(model_path=path, parallel=parallel, **sizes))
        for pages in runner._pool.pages.values():
            pages.zero_()
        trial, overtaken = DecodeTrial(runner, 5), []
        found = []
        for shares, apart in ((2, True), (2, False), (1, False)):
            before = 0 if runner.deferred is None else runner.deferred.overtaken
            found.append(trial.tokens(shares, apart=apart))
            overtaken.append(0 if runner.deferred is None else runner.deferred.overtaken - before)
        return found[0] == found[1], [len(each) for each in found], overtaken

    first, last = run_grid(1, 2, one)
    assert first == (True, [12, 12, 6], [0, 11, 0])
    assert last == (True, [12, 12, 6], [0, 0, 0])
