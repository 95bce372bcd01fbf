"""Adapters of a model that is split over ranks: text equals merged models', and all ranks keep an adapter or none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sapwood_common.errors import InvalidArgumentError
from sapwood_testing.models.adapters import make_adapter
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.models.tiny_models import Tiny
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.lora import Lora, LoraFacts, LoraLoad

pytest.importorskip("peft", reason="PEFT is not installed")
OPTIONS: dict[str, Any] = {"page_size": 8, "num_pages": 256, "max_running": 16, "lora_slots": 2, "lora_rank": 16}


def greedy(tiny: Tiny, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def generate(
    driver: Any, prompts: dict[int, list[int]], loads: tuple[LoraLoad, ...], count: int
) -> dict[int, list[int]]:
    """What the base, in row 0, and the adapters in the slots before the other rows say."""
    for row, prompt in prompts.items():
        driver.add(row, prompt, lora_slot=row - 1)
    for number in range(count):
        step = driver.output({row: len(prompt) if not number else 1 for row, prompt in prompts.items()})
        step.lora_loads = () if number else loads
        for row, tokens in zip(prompts, driver.runner.execute(step).token_ids, strict=True):
            driver.tokens[row] += tokens
    return {row: driver.tokens[row][len(prompt) :] for row, prompt in prompts.items()}


@pytest.mark.parametrize(
    ("name", "size", "stages", "whole_experts", "targets"),
    [
        ("llama", 2, 1, False, "all-linear"),
        ("phi3", 2, 1, False, "all-linear"),
        ("llama", 1, 2, False, "all-linear"),
        ("llama", 2, 2, False, "all-linear"),
        ("starcoder2", 2, 1, False, "all-linear"),  # whose biases come after the ranks' sum
        ("deepseek-v3", 2, 1, False, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]),
        ("qwen2-moe", 2, 1, True, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ],
)
def test_text_of_ranks_equals_merged_models(
    tiny_model: Any,
    make_driver: Any,
    tmp_path: Path,
    name: str,
    size: int,
    stages: int,
    whole_experts: bool,
    targets: Any,
) -> None:
    changes = {} if name in ("phi3", "deepseek-v3", "qwen2-moe", "starcoder2") else SHAPE
    if name in ("phi3", "starcoder2"):
        changes = {**SHAPE, "hidden_size": 128}
    tiny = tiny_model(name, **changes)
    adapters = [make_adapter(tiny, tmp_path / str(at), rank=5 + 9 * at, targets=targets, seed=at) for at in range(2)]
    prompts = {row: tokens_of(14 + row, seed=row) for row in range(3)}
    applied: list[ModelRunner] = []

    def work(leader: Any) -> tuple[dict[int, list[int]], list[LoraFacts]]:
        facts = [leader.read_lora(Lora(at, str(at), str(adapter.path))) for at, adapter in enumerate(adapters)]
        return generate(make_driver(leader), prompts, (LoraLoad(0, 0), LoraLoad(1, 1)), 6), facts

    found, facts = run_group(
        size, tiny.path, work, stages=stages, whole_experts=whole_experts, prepare=applied.append, **OPTIONS
    )
    assert found == {row: greedy(oracle, prompts[row], 6) for row, oracle in enumerate([tiny, *adapters])}
    assert len(applied) == size * stages
    for runner in applied:
        assert runner.loras is not None and runner.loras.batch.applied > 0
    assert [each.rank for each in facts] == [5, 14]


def test_all_ranks_keep_an_adapter_or_none_does(tiny_model: Any, tmp_path: Path) -> None:
    """The second stage alone has the layer whose tensor is wrong."""
    tiny = tiny_model("llama", **SHAPE)
    good = make_adapter(tiny, tmp_path / "good", targets=["q_proj"]).path
    bad = make_adapter(tiny, tmp_path / "bad", targets=["q_proj"]).path
    file = str(bad / "adapter_model.safetensors")
    tensors = load_file(file)
    name = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, file)
    runners: list[ModelRunner] = []

    def work(leader: Any) -> LoraFacts:
        with pytest.raises(InvalidArgumentError) as refused:
            leader.read_lora(Lora(1, "bad", str(bad)))
        assert refused.value.field == "lora_path"
        assert f"tensor {name} has shape" in str(refused.value) and "rank 1" in str(refused.value)
        facts: LoraFacts = leader.read_lora(Lora(2, "good", str(good)))
        return facts

    facts = run_group(1, tiny.path, work, stages=2, prepare=runners.append, **OPTIONS)
    kept = [runner.loras._adapters for runner in runners if runner.loras is not None]
    assert [set(each) for each in kept] == [{2}, {2}]
    sizes = [sum(matrices.nbytes for matrices in each[2].layers) for each in kept]
    assert facts.bytes == sum(sizes) and all(sizes)
