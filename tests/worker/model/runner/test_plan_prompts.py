"""Lengths of prompts for which cuDNN plans attention are met when a model starts, not when a request comes."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_kernels.attention.cudnn_lengths import rounded
from sapwood_worker.model.attention.backend import AttentionBatch
from sapwood_worker.model.attention.paged import PagedPlan
from sapwood_worker.model.runner.memory import plan_prompts


@pytest.mark.parametrize("most", [99, 120])
def test_every_length_is_met(most: int, tiny_model: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tiny_model("llama").path, num_pages=16, max_running=4, page_size=16)
    backend = runner._backend
    made, whole = backend.plan, []

    def plan(batch: AttentionBatch) -> PagedPlan:
        whole.extend(batch.seq_lens.tolist())
        assert batch.query_starts.tolist() == [0, batch.seq_lens[0]]
        return made(batch)

    monkeypatch.setattr(backend, "plan", plan)
    assert plan_prompts(most, runner._model, runner._pool, backend, runner.ops) == [] == whole  # the CPU plans nothing
    monkeypatch.setattr(backend, "plans_from", 32)
    found = plan_prompts(most, runner._model, runner._pool, backend, runner.ops)
    assert found == whole
    assert {rounded(each) for each in whole} == {rounded(each) for each in range(32, most + 1)}
    assert max(whole) <= most


def test_prompts_that_are_too_short_are_not_planned(tiny_model: Any, make_runner: Any) -> None:
    runner = make_runner(tiny_model("llama").path, num_pages=16, max_running=4, page_size=16)
    runner._backend.plans_from = 32
    assert plan_prompts(31, runner._model, runner._pool, runner._backend, runner.ops) == []
