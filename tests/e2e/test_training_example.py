"""The example of training, on a tiny model: rewards rise, and each step's rollouts are of that step's weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from sapwood_testing.models.tiny_models import make_tiny
from sapwood_testing.worker.worker_process import started_worker

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/grpo.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_policy_learns_from_rollouts_of_its_own_weights(example: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    path = make_tiny("llama", tmp_path / "model").path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    flags = ("--page-size", "8", "--num-pages", "512", "--max-running", "64", "--threads", "1")
    with started_worker(path, tmp_path / "log", *flags) as worker:
        prompts = [[token, 5, 6, 7] for token in range(10, 14)]
        reports = example.train(worker.address, model, prompts, steps=12, group=12, length=8, rate=5e-3)
    assert max(each.drift for each in reports) < 1e-3, "rollouts are of the weights that the trainer has"
    assert sum(each.reward for each in reports[-3:]) > sum(each.reward for each in reports[:3]) + 0.3, reports
