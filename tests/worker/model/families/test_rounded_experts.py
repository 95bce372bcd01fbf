"""``--quantization`` of models with experts: transformers' logits with the numbers that weights are rounded to."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_kernels import reference
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.quantised.grouped import dequantise, round_to_groups
from sapwood_kernels.quantised.int8 import round_weight
from sapwood_testing.worker.split_models import logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.loader import load_model

TOKENS = [3 + i * 7 % 90 for i in range(23)]
SIZES = {"hidden_size": 128, "num_hidden_layers": 2}
FAMILIES = {
    "qwen3-moe": {**SIZES, "moe_intermediate_size": 128},
    "qwen2-moe": {**SIZES, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "llama4": {**SIZES, "intermediate_size": 128, "attention_chunk_size": 64},
    "gpt-oss": {**SIZES, "intermediate_size": 128},
}
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the model is a CPU's, whose kernels the interpreter takes"
)


def load(path, quantization, ops=None, parallel=None):
    return load_model(
        path, "auto", torch.float32, ops or device_ops("cpu"), context_length=None, threads=1, seed=0,
        quantization=quantization, parallel=parallel,
    )  # fmt: skip


def by_groups(weight):
    return weight if weight.shape[1] % 128 else dequantise(round_to_groups(weight, 128))


def by_row(weight):
    codes, scales = reference.quantise_rows(weight)
    return codes.float() * scales


def by_block(weight):
    if any(size % 128 for size in weight.shape):
        return by_row(weight)
    return reference.dequantise_blocks(*reference.quantise_blocks(weight))


def int8(weight):
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


ROUNDINGS = {"int4": by_groups, "int8": int8, "fp8": by_row, "fp8_block": by_block}


def matrices(tensors, experts):
    """What is rounded, by name: [*, N, K] views that may be written to; of experts alone, or of other layers alone."""
    for name, each in tensors.items():
        of_experts = ".experts." in name and not name.endswith("bias")
        router = name.endswith(("mlp.gate.weight", "router.weight", "shared_expert_gate.weight"))
        if of_experts == experts and (of_experts or name.endswith("weight")) and not router and "embed" not in name:
            if each.dim() == 3:
                yield name, each.transpose(1, 2)  # as they are held joined: [E, K, N]
            elif each.dim() == 2 and "lm_head" not in name:
                yield name, each


@pytest.fixture
def oracle(tiny_model, tmp_path):
    """A tiny model's path, and transformers' logits with its matrices rounded."""

    def make(family, rounding, everything=True):
        from transformers import AutoModelForCausalLM

        tiny = tiny_model(family, **FAMILIES[family])
        wide = shutil.copytree(tiny.path, tmp_path / "wide")
        tensors = load_file(wide / "model.safetensors")
        found = [*matrices(tensors, experts=True), *(matrices(tensors, experts=False) if everything else ())]
        assert any("experts" in name for name, _ in found)
        for _, each in found:
            for matrix in each if each.dim() == 3 else [each]:
                matrix.copy_(rounding(matrix.contiguous()))
        if rounding is by_groups and everything:
            codes, scales = round_weight(tensors["lm_head.weight"])
            tensors["lm_head.weight"] = codes * scales
        save_file({name: each.contiguous() for name, each in tensors.items()}, wide / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(wide, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.inference_mode():
            return tiny.path, model(torch.tensor([TOKENS])).logits[0]

    return make


def assert_near(ours, theirs, limit=4e-5):
    """The output head of an int4 model takes hidden states in 16 bits."""
    worst = float((ours - theirs).abs().max() / theirs.abs().max())
    assert worst <= limit, worst


@pytest.mark.parametrize(
    "family", [each if each == "qwen2-moe" else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_int4_gives_transformers_logits_with_the_rounded_numbers(oracle, family):
    path, theirs = oracle(family, by_groups)
    loaded = load(path, "int4")
    assert loaded.quantization == "int4"
    assert not any(".experts." in name and "bias" not in name for name in loaded.model.weights()), "held once, rounded"
    assert_near(logits_of(loaded, TOKENS), theirs)


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_round_their_part(oracle, whole):
    path, theirs = oracle("qwen3-moe", by_row)

    def work(group):
        parallel = Parallel(tp=group, ep=group if whole else Group())
        return logits_of(load(path, "fp8", parallel=parallel), TOKENS, parallel)

    for logits in run_ranks(2, work):
        far = (logits - theirs).abs().amax(1) / theirs.abs().max()
        assert far.median() < 0.1, "activations are rounded, too"


@pytest.mark.parametrize("name", ["int8", "fp8", pytest.param("fp8_block", marks=pytest.mark.slow)])
def test_rounded_activations_change_the_logits_little(oracle, name):
    path, theirs = oracle("qwen3-moe", ROUNDINGS[name])
    loaded = load(path, name)
    assert loaded.quantization == name
    far = (logits_of(loaded, TOKENS) - theirs).abs().amax(1) / theirs.abs().max()
    assert 0 < far.median() < 0.1, "but for tokens that then go to another expert"


@on_cpu
@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "fp8_block", "fp8_tensor"])
def test_a_gpu_holds_the_rounded_numbers_in_one_stack(tiny_model, name):
    cuda = pytest.importorskip("sapwood_kernels.ops.cuda")
    path = tiny_model("qwen3-moe", **FAMILIES["qwen3-moe"]).path
    tensors = load_file(path / "model.safetensors")
    loaded = load(path, name, cuda.CudaOps(torch.device("cpu")))
    assert loaded.quantization == name
    held = {
        index: layer.mlp.experts for index, layer in enumerate(loaded.model.layers) if hasattr(layer.mlp, "experts")
    }
    assert held
    for index, experts in held.items():
        stacks = experts._sum._sum.keywords
        for expert in range(stacks["down"].experts):
            stem = f"model.layers.{index}.mlp.experts.{expert}"
            gate, up, down = (tensors[f"{stem}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            for part, wide in (("gate_up", torch.cat((gate, up))), ("down", down)):
                if name == "fp8_tensor":
                    codes, scale = reference.quantise_tensor(wide)
                    expected = codes.float() * scale
                else:
                    expected = ROUNDINGS[name](wide)
                torch.testing.assert_close(dequantise(stacks[part].weight(expert)), expected, rtol=1e-6, atol=0)


@on_cpu
@pytest.mark.slow
def test_a_gpu_s_kernels_multiply_them(oracle):
    cuda = pytest.importorskip("sapwood_kernels.ops.cuda")
    path, theirs = oracle("qwen3-moe", by_groups)
    loaded = load(path, "int4", cuda.CudaOps(torch.device("cpu")))
    assert_near(logits_of(loaded, TOKENS[:5]), theirs[:5])


def test_experts_that_are_stored_in_few_bits_are_not_rounded_again(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model("qwen3-moe", **FAMILIES["qwen3-moe"]).path, tmp_path / "stored")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        codes, scales = reference.quantise_rows(tensors[name])
        tensors |= {name: codes, f"{name}_scale": scales}
    save_file(tensors, path / "model.safetensors")
    assert load(path, "int8").quantization == "fp8 as stored+int8"
