"""A model whose adapters are computed by a GPU's kernels, from a GPU's slots: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.device import DeviceOps
from sapwood_testing.models.adapters import make_adapter
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.models.tiny_models import Tiny, make_tiny
from sapwood_testing.worker.eager_graphs import with_graphs
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.lora import Lora, LoraLoad

pytest.importorskip("peft", reason="PEFT is not installed")
pytest.importorskip("triton", reason="Triton is not installed")
cuda_slots = pytest.importorskip("sapwood_kernels.lora.cuda_slots")

GPU = torch.cuda.is_available()
STEPS = 3
MakeRunner = Callable[[Tiny, int], ModelRunner]


@pytest.fixture
def runner_of(monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    """Makes a runner whose slots are a GPU's: ``runner_of(tiny, slots)``."""

    def make(tiny: Tiny, slots: int) -> ModelRunner:
        if not GPU:
            monkeypatch.setattr(CpuOps, "lora_multiple", 16, raising=False)
            monkeypatch.setattr(CpuOps, "lora_slots", gpu_slots)
        return build_runner(
            RunnerOptions(
                model_path=tiny.path, device="cuda" if GPU else "cpu", dtype="float32", page_size=8, num_pages=256,
                max_running=16, threads=1, lora_slots=slots, lora_rank=32, max_step_tokens=512,
            )
        )  # fmt: skip

    return make


def gpu_slots(ops: DeviceOps, slots: int, rank: int, dtype: torch.dtype) -> object:
    return cuda_slots.CudaLoraSlots(slots, dtype, ops.gated, ops.device, rank, ops.fill)


def generate(runner: ModelRunner, prompts: Sequence[list[int]], loads: tuple[LoraLoad, ...]) -> list[list[int]]:
    """What one request for the base and one for each slot generate in the same steps, greedily."""
    table = np.arange(len(prompts) * 16, dtype=np.int32).reshape(len(prompts), 16)
    done = [list(prompt) for prompt in prompts]
    for number in range(STEPS):
        parts = [
            Part(
                row, tokens if not number else tokens[-1:], 0 if not number else len(tokens) - 1, 1,
                SamplingParams(temperature=0.0), not number, array("I", tokens), len(tokens), len(tokens),
                lora_slot=row - 1,
            )
            for row, tokens in enumerate(done)
        ]  # fmt: skip
        step = step_for(runner.info, number, table, parts)
        step.lora_loads = () if number else loads
        for tokens, found in zip(done, runner.execute(step).token_ids, strict=True):
            tokens += found
    return [tokens[len(prompt) :] for tokens, prompt in zip(done, prompts, strict=True)]


def greedy(tiny: Tiny, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(STEPS):
        tokens.append(int(tiny.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("graphs", [False, True])
def test_text_by_kernels_and_from_graphs_equals_merged_models(
    tmp_path: Path, runner_of: MakeRunner, graphs: bool
) -> None:
    tiny = make_tiny("qwen3", tmp_path / "model")
    targets = (["q_proj", "o_proj", "gate_proj", "down_proj"], "all-linear")
    adapters = [
        make_adapter(tiny, tmp_path / str(slot), rank=rank, targets=targets[slot], seed=slot)
        for slot, rank in enumerate((5, 32))
    ]
    runner = runner_of(tiny, len(adapters))
    assert runner.loras is not None
    if graphs and not GPU:
        with_graphs(runner, [2, 4, 8])
    prompts = [tokens_of(11 + row, seed=row) for row in range(1 + len(adapters))]
    for slot, adapter in enumerate(adapters):
        runner.read_lora(Lora(1 + slot, str(slot), str(adapter.path)))
    first, second = LoraLoad(0, 1), LoraLoad(1, 2)
    found = generate(runner, prompts, (first, second))
    oracles = [tiny, *adapters]
    assert found == [greedy(oracle, prompt) for oracle, prompt in zip(oracles, prompts, strict=True)]
    rows = sum(map(len, prompts[1:])) + (STEPS - 1) * len(adapters)
    assert runner.loras.batch.applied == rows * len(runner.loras.key)
    if graphs and not GPU:
        assert runner._graphs is not None and runner._graphs._adapted, "decodes were computed from graphs"
    # Reloaded in each other's places.
    found = generate(runner, prompts, (LoraLoad(1, 1), LoraLoad(0, 2)))
    oracles = [tiny, adapters[1], adapters[0]]
    assert found == [greedy(oracle, prompt) for oracle, prompt in zip(oracles, prompts, strict=True)]
