"""Made-up drafts before the first request: they run every kind of step, and leave nothing that a request could notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sapwood_kernels.ops.cpu import CpuOps
from sapwood_testing.drafts.eagle_head import random_tensors, write
from sapwood_testing.worker.eager_graphs import with_graphs
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.runner.builder import build_drafted_runner, build_headed_runner, build_runner
from sapwood_worker.model.runner.drafting_runner import DraftingRunner, try_checks, try_drafts
from sapwood_worker.model.runner.factory import make_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions


def options(path: Any, **changes: Any) -> RunnerOptions:
    return RunnerOptions(model_path=path, threads=1, **{"num_pages": 32, "max_running": 4} | changes)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_that_checked_made_up_drafts_answers_as_one_that_did_not(
    tiny_model: Any, make_driver: Any, name: str
) -> None:
    path = tiny_model(name).path
    fresh, tried = (build_runner(options(path)) for _ in range(2))
    sampled = []
    execute = tried.execute

    def counted(step: Any) -> Any:
        output = execute(step)
        sampled.append([len(tokens) for tokens in output.token_ids])
        return output

    tried.execute = counted  # type: ignore[method-assign]
    assert try_checks(tried) == len(sampled) == 12
    assert all(1 <= count <= 8 for counts in sampled for count in counts)
    prompts = {0: [5, 6, 7], 1: [9] * 7}
    assert make_driver(tried).generate(prompts, 6, {}) == make_driver(fresh).generate(prompts, 6, {})


def test_a_draft_model_drafts_in_chains_and_step_by_step(tiny_model: Any, make_driver: Any) -> None:
    path = tiny_model("llama").path
    runner = build_drafted_runner(options(path), options(path))
    draft = runner.draft
    assert isinstance(draft, DraftingRunner)
    assert try_drafts(runner, draft, 0) == 16
    with_graphs(draft, [1, 2, 4])
    assert try_drafts(runner, draft, 0) == 4 * 3
    prompts = {0: [5, 6, 7], 1: [9] * 7}
    wanted = make_driver(build_runner(options(path))).generate(prompts, 6, {})
    assert make_driver(draft).generate(prompts, 6, {}) == wanted


def test_a_head_drafts_from_its_first_position_on(tiny_model: Any, tmp_path: Path) -> None:
    runner = build_headed_runner(options(tiny_model("llama").path), write(tmp_path / "head", random_tensors()))
    assert isinstance(runner.draft, DraftingRunner) and try_drafts(runner, runner.draft, 1) == 16


def test_a_worker_on_a_gpu_drafts_before_it_is_ready(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuOps, "asynchronous", True)
    executed, execute = [], ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda self, step: executed.append(self) or execute(self, step))
    path = str(tiny_model("llama").path)
    runner = make_runner(WorkerConfig(model=path, speculate=f"draft:{path}", num_pages=32, max_running=4, threads=1))
    assert isinstance(runner, ModelRunner)
    assert [executed.count(each) for each in (runner, runner.draft)] == [12, 12 + 16]  # a draft model is a model too


def test_what_has_no_room_for_them_is_left_alone(tiny_model: Any) -> None:
    small = options(tiny_model("llama").path, page_size=4, num_pages=2, max_running=1)
    runner = build_drafted_runner(small, small)
    assert isinstance(runner.draft, DraftingRunner)
    assert try_checks(runner) == try_drafts(runner, runner.draft, 0) == 0
