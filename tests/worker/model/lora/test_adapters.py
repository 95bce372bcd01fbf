"""Logits with adapters equal those of the models that PEFT merges them into."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sapwood_common.errors import InvalidArgumentError
from sapwood_testing.models.adapters import make_adapter
from sapwood_testing.models.dense_models import DENSE
from sapwood_testing.models.gguf_files import write_gguf
from sapwood_testing.models.same_logits import assert_same_logits, tokens_of
from sapwood_testing.models.tiny_models import Tiny
from sapwood_worker.model.layers.linear import ColumnLinear
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.lora import Lora, LoraLoad

pytest.importorskip("peft", reason="PEFT is not installed")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
OWN_NAMES = ("falcon", "gpt", "opt", "phi-two")
"""Families whose checkpoints name linear layers otherwise than Llama's: their adapters are refused."""


def loads_of(runner: ModelRunner, adapters: dict[int, Tiny]) -> tuple[LoraLoad, ...]:
    """Has a runner read adapters, by their slots, with numbers that are 100 above."""
    for slot, adapter in adapters.items():
        runner.read_lora(Lora(100 + slot, f"adapter {slot}", str(adapter.path)))
    return tuple(LoraLoad(slot, 100 + slot) for slot in adapters)


def assert_equal_to_merged(driver: Any, base: Tiny, adapters: dict[int, Tiny]) -> None:
    """Asserts that logits of a request for the base and one for each adapter, all in the same steps, in chunks and decodes,
    are the merged models'."""
    oracles = {0: base} | {slot + 1: adapter for slot, adapter in adapters.items()}
    prompts = {row: tokens_of(40 + 3 * row, seed=row) for row in oracles}
    loads = loads_of(driver.runner, adapters)
    for row, tokens in prompts.items():
        driver.add(row, tokens, lora_slot=row - 1)
    parts: dict[int, list[torch.Tensor]] = {row: [] for row in prompts}
    chunks = [dict.fromkeys(prompts, 8), {row: len(tokens) - 10 for row, tokens in prompts.items()}]
    before = driver.runner.loras.batch.applied
    for number, chunk in enumerate([*chunks, dict.fromkeys(prompts, 1), dict.fromkeys(reversed(prompts), 1)]):
        step = driver.output(chunk)
        step.lora_loads = () if number else loads
        logits = driver.runner.logits(step)
        for row, part in zip(chunk, logits.split(list(chunk.values())), strict=True):
            parts[row].append(part)
    for row, tokens in prompts.items():
        assert_same_logits(torch.cat(parts[row]), oracles[row].logits(tokens))
    rows = sum(len(tokens) for row, tokens in prompts.items() if row)
    assert driver.runner.loras.batch.applied - before == rows * len(driver.runner.loras.key) > 0


@pytest.fixture
def make_adapted(tiny_model: Callable[..., Tiny], tmp_path: Path) -> Callable[..., Tiny]:
    """Makes an adapter of a tiny model: ``make_adapted(name, number, rank=8, targets="all-linear", ...)``."""
    return lambda name, number, **settings: make_adapter(
        tiny_model(name), tmp_path / f"{name}-{number}", seed=number, **settings
    )


def test_a_batch_of_base_and_eight_adapters_of_many_ranks_equals_merged_models(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any
) -> None:
    ranks = [4, 64, 8, 16, 5, 32, 48, 12]
    adapters = {slot: make_adapted("qwen3", slot, rank=rank) for slot, rank in enumerate(ranks)}
    runner = make_runner(tiny_model("qwen3").path, page_size=8, lora_slots=8, lora_rank=64)
    assert_equal_to_merged(make_driver(runner), tiny_model("qwen3"), adapters)


@pytest.mark.parametrize("name", [name for name in DENSE if not name.startswith(OWN_NAMES)])
def test_adapters_of_every_dense_family_equal_merged_models(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any, name: str
) -> None:
    targets = {"minicpm3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *MLP]}
    targets["youtu"] = targets["minicpm3"]
    adapters = {
        slot: make_adapted(name, slot, rank=6 + slot, targets=targets.get(name, "all-linear")) for slot in (0, 1)
    }
    runner = make_runner(tiny_model(name).path, page_size=8, lora_slots=2, lora_rank=16)
    assert_equal_to_merged(make_driver(runner), tiny_model(name), adapters)


@pytest.mark.parametrize("name", ["falcon-7b", "gpt-neox", "gptj", "opt", "phi-two"])
def test_adapters_of_families_that_name_modules_otherwise_are_refused_by_tensor_and_module(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any, name: str
) -> None:
    adapters = {0: make_adapted(name, 0, rank=4, targets="all-linear")}
    runner = make_runner(tiny_model(name).path, page_size=8, lora_slots=2, lora_rank=16)
    with pytest.raises(InvalidArgumentError, match=r"tensor base_model\.\S+: .*model\.layers\.0\.\w+"):
        assert_equal_to_merged(make_driver(runner), tiny_model(name), adapters)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 12},
            "alpha_pattern": {"o_proj": 3, "layers.2.mlp.*": 5},
            "lora_alpha": 6,
        },
        {"layers_to_transform": [1, 3], "targets": MLP},
        {"targets": "model\\.layers\\.[02]\\..*(q|down)_proj"},
        {"targets": ["q_proj"], "exclude_modules": ["layers.2.self_attn.q_proj"]},
        {"targets": ["layers.2.self_attn.v_proj"]},
    ],
    ids=str,
)
def test_settings_of_peft_mean_what_they_do_there(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any, settings: dict[str, Any]
) -> None:
    adapters = {0: make_adapted("llama", 0, **settings), 1: make_adapted("llama", 1, rank=4, targets=ATTENTION)}
    runner = make_runner(tiny_model("llama").path, page_size=8, lora_slots=2, lora_rank=16)
    assert_equal_to_merged(make_driver(runner), tiny_model("llama"), adapters)


LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
# PEFT itself has adapters of other families' shared experts be for their experts, too.
SHARED = "model\\.layers\\.\\d+\\.(self_attn\\..*_proj|mlp\\.shared_experts?\\..*_proj)"


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("mixtral", ATTENTION),
        ("qwen3-moe", ATTENTION),
        ("qwen2-moe", SHARED),
        ("glm4-moe", ATTENTION),
        ("gpt-oss", ATTENTION),
        ("deepseek-v2", LATENT),
        ("deepseek-v3", LATENT),
    ],
)
def test_adapters_of_models_with_experts_and_of_latent_attention_equal_merged_models(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any, name: str, targets: Any
) -> None:
    there = targets
    if name.startswith("deepseek"):  # PEFT refuses names that the model does not have
        ours = [module for module, _ in tiny_model(name).oracle.named_modules()]
        there = [target for target in targets if any(module.endswith(f".{target}") for module in ours)]
    adapters = {slot: make_adapted(name, slot, rank=5 + slot, targets=there) for slot in (0, 1)}
    runner = make_runner(tiny_model(name).path, page_size=8, lora_slots=2, lora_rank=16)
    assert_equal_to_merged(make_driver(runner), tiny_model(name), adapters)


def generated(
    driver: Any, prompts: dict[int, list[int]], slots: dict[int, int], loads: tuple[LoraLoad, ...], count: int = 6
) -> dict[int, list[int]]:
    """What prompts generate by their rows, greedily, with the adapters in some slots, all in the same steps."""
    for row, prompt in prompts.items():
        driver.add(row, prompt, lora_slot=slots.get(row, -1))
    for number in range(count):
        step = driver.output({row: len(prompt) if not number else 1 for row, prompt in prompts.items()})
        step.lora_loads = () if number else loads
        result = driver.runner.execute(step)
        for row, tokens in zip(prompts, result.token_ids, strict=True):
            driver.tokens[row] += tokens
    return {row: driver.tokens[row][len(prompt) :] for row, prompt in prompts.items()}


def greedy(tiny: Tiny, prompt: list[int], count: int = 6) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("quantization", ["none", "int4", "int8"])
def test_base_requests_are_bit_equal_with_and_without_adapters_in_slots(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any, quantization: str
) -> None:
    tiny, adapter = tiny_model("wide"), make_adapted("wide", 0, rank=4)
    off = make_driver(make_runner(tiny.path, quantization=quantization))
    on = make_driver(make_runner(tiny.path, quantization=quantization, lora_slots=2, lora_rank=8))
    prompts = {row: tokens_of(9 + row, seed=row) for row in range(3)}
    loads = loads_of(on.runner, {0: adapter})
    mixed = generated(on, prompts | {3: tokens_of(12)}, {3: 0}, loads)
    alone = generated(on, prompts, {}, ())
    assert {row: mixed[row] for row in prompts} == alone == generated(off, prompts, {}, ())
    for driver in (on, off):
        driver.add(5, tokens_of(30))
    logits = [driver.runner.logits(driver.output({5: 30})) for driver in (on, off)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_layers_of_a_quantised_base_add_what_the_adapter_says_to_their_own_product(
    tiny_model: Any, make_runner: Any, make_adapted: Any, quantization: str
) -> None:
    tiny, adapter = tiny_model("wide"), make_adapted("wide", 0, rank=4)
    runner = make_runner(tiny.path, quantization=quantization, lora_slots=1, lora_rank=4)
    runner.loras.load(loads_of(runner, {0: adapter}))
    slots = np.array([0, -1, 0, 0])
    weights = tiny.oracle.state_dict(), adapter.oracle.state_dict()
    for linear in (site.linear for site in runner.loras._sites):
        x = torch.randn(len(slots), linear.shape.columns.size)
        with torch.inference_mode():
            plain = linear(x, None) if isinstance(linear, ColumnLinear) else linear(x)
            with runner.loras.computing(slots):
                found = linear(x, None) if isinstance(linear, ColumnLinear) else linear(x)
        change = torch.cat(
            [weights[1][f"{p.name}.weight"] - weights[0][f"{p.name}.weight"] for p in linear.shape.parts]
        )
        wanted = plain + (torch.from_numpy(slots) == 0)[:, None] * (x @ change.t())
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
        assert torch.equal(found[1], plain[1])


def test_slots_are_overwritten_and_adapters_loaded_again(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any
) -> None:
    tiny = tiny_model("llama")
    adapters = [make_adapted("llama", number, rank=4 + 4 * number) for number in range(3)]
    driver = make_driver(make_runner(tiny.path, lora_slots=1, lora_rank=16))
    for number, adapter in enumerate(adapters):
        driver.runner.read_lora(Lora(number, str(number), str(adapter.path)))
    prompt = tokens_of(15)
    for number in (0, 1, 2, 0, 2):
        found = generated(driver, {0: prompt, 1: prompt}, {0: 0}, (LoraLoad(0, number),))
        assert found == {0: greedy(adapters[number], prompt), 1: greedy(tiny, prompt)}
    driver.runner.drop_lora(0)
    assert generated(driver, {0: prompt}, {0: 0}, ()) == {0: greedy(adapters[2], prompt)}


def test_drafts_are_checked_with_the_adapter_of_their_request(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any
) -> None:
    """The base's own continuation is the draft: only what the adapter would have said, too, is accepted."""
    tiny, adapter = tiny_model("llama"), make_adapted("llama", 0, rank=4, lora_alpha=0.4)
    driver = make_driver(make_runner(tiny.path, lora_slots=1, lora_rank=4))
    loads, prompt = loads_of(driver.runner, {0: adapter}), tokens_of(25)
    for draft in (greedy(tiny, prompt, 5), greedy(adapter, prompt, 5)):
        driver.add(0, prompt + draft, lora_slot=0)
        step = driver.output({0: len(prompt)})
        step.lora_loads = loads
        driver.runner.execute(step)
        check = driver.output({0: len(draft)})
        check.samples[:] = len(draft)
        found = driver.runner.execute(check).token_ids[0]
        wanted = greedy(adapter, prompt, 7)
        assert found == wanted[1 : 1 + len(found)]
        right = next(
            (at for at, (one, other) in enumerate(zip(draft, wanted, strict=False)) if one != other), len(draft)
        )
        assert len(found) == max(right, 1) or found == []


def gguf_of(tiny: Tiny, adapter: Tiny, path: Path, architecture: str) -> Path:
    """An adapter of PEFT's as llama.cpp's converter writes it: the rows of Llama's queries and keys in interleaved order."""
    import gguf

    config = json.loads((adapter.path / "adapter_config.json").read_text())
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down"}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for name, tensor in load_file(str(adapter.path / "adapter_model.safetensors")).items():
        _, layer, rest = re.split(r"layers\.(\d+)\.", name)
        module, kind = rest.removesuffix(".weight").rsplit(".", 1)
        if architecture == "llama" and kind == "lora_B" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = tensor.view(-1, 2, tiny.oracle.config.head_dim // 2, tensor.shape[1])
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"blk.{layer}.{names[module]}.weight.{kind.lower()}", tensor.float().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "gemma3"])
def test_gguf_adapters_equal_merged_models_on_bases_of_both_formats(
    tiny_model: Any, make_runner: Any, make_driver: Any, make_adapted: Any, tmp_path: Path, name: str
) -> None:
    tiny, made = tiny_model(name), make_adapted(name, 0, rank=6)
    architecture = "llama" if name == "mistral-window" else name  # as llama.cpp calls Mistral
    adapter = Tiny(gguf_of(tiny, made, tmp_path / "adapter.gguf", architecture), made.oracle)
    bases = [tiny.path]
    if name in ("llama", "qwen3"):  # files of the others say less than these models' settings
        bases.append(write_gguf(tmp_path / "model.gguf", tiny.oracle, architecture))
    for base in bases:
        runner = make_runner(base, page_size=8, lora_slots=2, lora_rank=8)
        assert_equal_to_merged(make_driver(runner), tiny, {0: adapter, 1: made})
