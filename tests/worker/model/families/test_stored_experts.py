"""Experts in the formats that linear layers are stored in: transformers' logits with the numbers that these stand for."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models import quantised_layers as layouts
from sapwood_testing.worker.split_models import logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.loader import load_model

TOKENS = [3 + i * 7 % 90 for i in range(23)]
SIZES = {"hidden_size": 128}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel"}


def compressed(weights, activations=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def by_importance(weight):
    return layouts.gptq(weight, group=32, order=layouts.shuffled(weight.shape[1], 32))


FLOAT8 = {"num_bits": 8, "type": "float"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def by_rows(weight):
    return layouts.float8(weight, block=(1, weight.shape[1]))


# How a layer is stored, quantization_config, the format's name.
FORMATS = {
    "gptq": (layouts.gptq, GPTQ, "gptq"),
    "gptq desc_act": (by_importance, GPTQ | {"desc_act": True}, "gptq"),
    "awq": (layouts.awq, AWQ, "awq"),
    "W4A16": (layouts.pack_quantized, compressed(GROUPS), "compressed-tensors"),
    "W8A16": (layouts.int8, compressed(CHANNELS), "compressed-tensors"),
    "W8A8": (layouts.int8, compressed(CHANNELS, CHANNELS | {"dynamic": True}), "compressed-tensors"),
    "NF4": (layouts.nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "MXFP4": (layouts.mxfp4, compressed({"num_bits": 4, "type": "float"}), "fp4"),
    "NVFP4": (partial(layouts.nvfp4, kind="modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
    "float8 dynamic": (by_rows, compressed(FLOAT8, FLOAT8 | {"dynamic": True}), "fp8"),
    "float8 by tensor": (partial(layouts.float8, block=None), {"quant_method": "fp8"}, "fp8"),
    "modelopt float8": (partial(layouts.float8, block=None), {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    "float8 blocks": (partial(layouts.float8, block=(128, 128), name="weight_scale_inv"), BLOCKS, "fp8"),
}
FAMILIES = {
    "qwen3-moe": {**SIZES, "moe_intermediate_size": 64, "num_hidden_layers": 2},
    "mixtral": {**SIZES, "intermediate_size": 64, "num_hidden_layers": 2},
}
slow = pytest.mark.slow
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the model is a CPU's, whose kernels the interpreter takes"
)


def load(path, ops=None, **options):
    return load_model(
        path, "auto", torch.float32, ops or device_ops("cpu"), context_length=None, threads=1, seed=0, **options
    )


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture
def stored(tiny_model, tmp_path):
    """Stores a tiny model's experts in a format; returns the path, and transformers' logits with what they stand for."""

    def make(family, name):
        from transformers import AutoModelForCausalLM

        layout, quantization, _ = FORMATS[name]
        tiny = tiny_model(family, **FAMILIES[family])
        path, wide = (shutil.copytree(tiny.path, tmp_path / kind) for kind in ("stored", "wide"))
        made = {}

        def widen(tensors):
            for each in [each for each in tensors if ".experts." in each]:
                made[each], tensors[each] = layout(tensors[each])

        def store(tensors):
            for each, parts in made.items():
                del tensors[each]
                stem = each.removesuffix(".weight")
                tensors.update({f"{stem}.{kind}": part.contiguous() for kind, part in parts.items()})

        edit(wide, widen)
        edit(path, store)
        config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
        (path / "config.json").write_text(json.dumps(config))
        assert made
        oracle = AutoModelForCausalLM.from_pretrained(wide, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.inference_mode():
            return path, oracle(torch.tensor([TOKENS])).logits[0]

    return make


def assert_near(ours, theirs):
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3-moe", "gptq"),
        ("mixtral", "awq"),
        ("qwen3-moe", "W4A16"),
        ("mixtral", "W8A16"),
        ("qwen3-moe", "float8 dynamic"),
        ("mixtral", "modelopt float8"),
        *(pytest.param(*each, marks=slow) for each in (("mixtral", "gptq"), ("qwen3-moe", "gptq desc_act"))),
        *(pytest.param(*each, marks=slow) for each in (("mixtral", "NF4"), ("qwen3-moe", "MXFP4"))),
        *(
            pytest.param(*each, marks=slow)
            for each in (("mixtral", "float8 by tensor"), ("qwen3-moe", "float8 blocks"))
        ),
    ],
)
def test_logits_are_those_of_transformers_with_the_same_numbers(stored, family, name):
    path, theirs = stored(family, name)
    loaded = load(path)
    assert f"{FORMATS[name][2]} as stored" in loaded.quantization
    assert_near(logits_of(loaded, TOKENS), theirs)


def test_experts_that_are_joined_in_16_bits_are_read_apart_in_float8(tiny_model, tmp_path):
    """Llama 4's, as llm-compressor stores them."""
    from transformers import AutoModelForCausalLM

    layout, quantization, _ = FORMATS["float8 dynamic"]
    tiny = tiny_model("llama4")
    path, wide = (shutil.copytree(tiny.path, tmp_path / kind) for kind in ("stored", "wide"))
    tensors, numbers = (load_file(each / "model.safetensors") for each in (path, wide))
    for name in [each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stem, kind = name.rsplit(".", 1)
        of_experts = tensors.pop(name)
        for expert, each in enumerate(of_experts):
            parts = each.chunk(2, 1) if kind == "gate_up_proj" else [each]
            made = [layout(part.t().contiguous()) for part in parts]
            numbers[name][expert] = torch.cat([rounded.t() for _, rounded in made], 1)
            for projection, (stored, _) in zip(
                ("gate_proj", "up_proj") if len(parts) > 1 else ("down_proj",), made, strict=True
            ):
                tensors |= {f"{stem}.{expert}.{projection}.{part}": held for part, held in stored.items()}
    save_file(tensors, path / "model.safetensors")
    save_file(numbers, wide / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    loaded = load(path)
    assert loaded.quantization == "fp8 as stored"
    oracle = AutoModelForCausalLM.from_pretrained(wide, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert_near(logits_of(loaded, TOKENS[:15]), oracle(torch.tensor([TOKENS[:15]])).logits[0])


@slow
def test_activations_that_are_rounded_change_the_logits_little(stored):
    path, theirs = stored("qwen3-moe", "W8A8")
    far = (logits_of(load(path), TOKENS) - theirs).abs().amax(1) / theirs.abs().max()
    assert 1e-4 < far.median() < 0.05, "but for tokens that then go to another expert"


@pytest.mark.parametrize(("name", "whole"), [("gptq", False), ("W4A16", True)])
def test_ranks_have_their_part(stored, name, whole):
    path, theirs = stored("qwen3-moe", name)

    def work(group):
        parallel = Parallel(tp=group, ep=group if whole else Group())
        return logits_of(load(path, parallel=parallel), TOKENS, parallel)

    for logits in run_ranks(2, work):
        assert_near(logits, theirs)


def test_a_missing_tensor_is_named(stored):
    path, _ = stored("qwen3-moe", "gptq")
    name = "model.layers.1.mlp.experts.3.up_proj.scales"
    edit(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=rf"tensor {name} \(missing, gptq\)"):
        load(path)


def test_an_expert_in_another_format_is_named(stored):
    path, _ = stored("qwen3-moe", "gptq")
    stem = "model.layers.1.mlp.experts.3.down_proj"

    def widen(tensors):
        for kind in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{stem}.{kind}"]
        tensors[f"{stem}.weight"] = torch.zeros(128, 64)

    edit(path, widen)
    with pytest.raises(ConfigError, match=rf"tensor {stem}.g_idx \(missing, gptq\): the layer's first expert has one"):
        load(path)


def gate_ups(loaded):
    """The stacks of all layers before the activation."""
    layers = [layer.mlp.experts for layer in loaded.model.layers if hasattr(layer.mlp, "experts")]
    return [each._sum._sum.keywords["gate_up"] for each in layers]


# Bits of a number with its part of a scale and a zero, in a row of 128 numbers.
BITS = {
    "awq": 4 + 24 / 32,
    "W4A16": 4 + 24 / 32,
    "gptq desc_act": 4 + 24 / 32,
    "W8A16": 8 + 40 / 128,
    "W8A8": 8 + 32 / 128,
    "NF4": 4 + 32 / 64,
    "MXFP4": 4 + 16 / 32,
    "NVFP4": 4 + 8 / 16,
    "float8 dynamic": 8 + 32 / 128,
    "modelopt float8": 8 + 32 / 128,
    "float8 blocks": 8 + 32 / 128,
}


@on_cpu
@pytest.mark.parametrize("name", [each if each in ("awq", "W8A8") else pytest.param(each, marks=slow) for each in BITS])
def test_layers_by_a_gpu_s_kernels_equal_transformers_and_hold_what_is_stored(stored, name):
    cuda = pytest.importorskip("sapwood_kernels.ops.cuda")
    path, theirs = stored("qwen3-moe", name)
    loaded = load(path, cuda.CudaOps(torch.device("cpu")))
    assert f"{FORMATS[name][2]} as stored" in loaded.quantization
    stacks = gate_ups(loaded)
    assert stacks
    for stack in stacks:
        held = (stack.codes, stack.scales, *(each for each in (stack.zeros,) if each is not None))
        # A matrix is one block here, and its rows have one scale.
        rounds = name in ("W8A8", "float8 dynamic", "modelopt float8", "float8 blocks")
        assert stack.rounds == ("row" if rounds else None)
        assert 8 * sum(each.nbytes for each in held) == BITS[name] * stack.experts * stack.outputs * 128
    assert_near(logits_of(loaded, TOKENS[:3]), theirs[:3])


@on_cpu
def test_a_gpu_names_an_expert_whose_gate_and_up_are_in_different_orders(stored):
    cuda = pytest.importorskip("sapwood_kernels.ops.cuda")
    path, _ = stored("qwen3-moe", "gptq desc_act")
    name = "model.layers.1.mlp.experts.3.up_proj.g_idx"
    edit(path, lambda tensors: tensors.update({name: tensors[name].flip(0).contiguous()}))
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts.3.gate_proj: a GPU's product of experts does not"):
        load(path, cuda.CudaOps(torch.device("cpu")))
