"""Checkpoints in the formats that people have: read as stored, to the numbers that they stand for; what is broken is named."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models import quantised_layers as layouts
from sapwood_testing.worker.thread_ranks import ThreadGroup
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.loader import LoadedModel, load_model

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **others}


def gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, **settings}


def ordered(layout: Callable[..., layouts.Stored], group: int) -> layouts.Layout:
    return lambda weight: layout(weight, group=group, order=layouts.shuffled(weight.shape[1], group))


def in_storage(dtype: torch.dtype) -> layouts.Layout:
    """NF4 whose codes are stored as if they were other numbers."""

    def layout(weight: Tensor) -> layouts.Stored:
        tensors, wide = layouts.nf4(weight)
        return tensors | {"weight": tensors["weight"].view(-1).view(dtype).view(-1, 1)}, wide

    return layout


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# Name: how a layer is stored, quantization_config, the format's name, and how exact a product is that rounds activations.
FORMATS: dict[str, tuple[layouts.Layout, dict[str, Any], str, float]] = {
    "gptq": (layouts.gptq, gptq(), "gptq", 0),
    "gptq sym": (partial(layouts.gptq, sym=True), gptq(sym=True), "gptq", 0),
    "gptq one group a row": (
        lambda weight: layouts.gptq(weight, group=weight.shape[1]), gptq(group_size=-1), "gptq", 0,
    ),
    "gptq desc_act": (ordered(layouts.gptq, 64), gptq(desc_act=True, group_size=64), "gptq", 0),
    "gptq version 2": (partial(layouts.gptq, version=2), gptq(checkpoint_format="gptq_v2"), "gptq", 0),
    # GPTQModel 5: zeros as they are in files that call themselves version 1.
    "gptq sym zeros as they are": (
        partial(layouts.gptq, sym=True, version=2), gptq(sym=True, checkpoint_format="gptq"), "gptq", 0,
    ),
    "gptq 8 bits sym zeros as they are": (
        partial(layouts.gptq, bits=8, sym=True, version=2), gptq(bits=8, sym=True, checkpoint_format="gptq"), "gptq", 0,
    ),
    "gptq dynamic": (layouts.gptq, gptq(group_size=64, dynamic={"+:.*": {"group_size": 32}}), "gptq", 0),
    "gptq 8 bits": (partial(layouts.gptq, bits=8), gptq(bits=8), "gptq", 0),
    "awq": (layouts.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, "awq", 0),
    "W4A16": (layouts.pack_quantized, compressed(INT4), "compressed-tensors", 0),
    "W4A16 asym": (partial(layouts.pack_quantized, sym=False), compressed(INT4), "compressed-tensors", 0),
    "W4A16 actorder": (ordered(layouts.pack_quantized, 32), compressed(INT4), "compressed-tensors", 0),
    "W8A16 packed": (
        lambda weight: layouts.pack_quantized(weight, bits=8, group=weight.shape[1]), compressed(INT8), "compressed-tensors", 0,
    ),
    "W8A16 plain": (layouts.int8, compressed(INT8), "compressed-tensors", 0),
    "W8A8": (layouts.int8, compressed(INT8, {**INT8, "dynamic": True}), "compressed-tensors", 0.02),
    "W8A8 by tensor": (partial(layouts.int8, by="tensor"), compressed(INT8, INT8), "compressed-tensors", 0.02),
    "float8 weights by row": (lambda weight: layouts.float8(weight, block=(1, weight.shape[1])), compressed(FLOAT8), "fp8", 0),
    "float8 weights by tensor": (partial(layouts.float8, block=None), compressed(FLOAT8), "fp8", 0),
    "float8 blocks": (partial(layouts.float8, block=(128, 128), name="weight_scale_inv"), BLOCKS, "fp8", 0.1),
    "float8 blocks that units do not take": (
        partial(layouts.float8, block=(96, 96), name="weight_scale_inv"),
        BLOCKS | {"weight_block_size": [96, 96]}, "fp8", 0,
    ),
    "modelopt float8": (
        partial(layouts.float8, block=None), {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 0.1,
    ),
    "NVFP4": (partial(layouts.nvfp4, kind="compressed-tensors"), compressed({"num_bits": 4, "type": "float"}), "fp4", 0),
    "modelopt NVFP4": (partial(layouts.nvfp4, kind="modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4", 0),
    "MXFP4": (layouts.mxfp4, compressed({"num_bits": 4, "type": "float"}), "fp4", 0),
    "NF4": (layouts.nf4, BNB, "bitsandbytes", 0),
    "NF4 stored as bfloat16": (in_storage(torch.bfloat16), BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "bitsandbytes", 0),
    "NF4 stored as float32": (in_storage(torch.float32), BNB | {"bnb_4bit_quant_storage": "float32"}, "bitsandbytes", 0),
    "NF4 nested": (partial(layouts.nf4, nested=True), BNB, "bitsandbytes", 0),
    "LLM.int8": (layouts.llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes", 0),
}  # fmt: skip


@pytest.fixture
def stored(tiny_model, tmp_path) -> Callable[..., tuple[Path, dict[str, Tensor]]]:
    """Stores a tiny Llama's projections in a layout; returns the path and the numbers that they stand for, by module."""

    def make(
        layout: layouts.Layout, quantization: dict[str, Any], ignored: str = "nothing"
    ) -> tuple[Path, dict[str, Tensor]]:
        path = tmp_path / "stored"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tiny_model("wide").path, path)
        tensors, wide = load_file(path / "model.safetensors"), {}
        for name in [each for each in tensors if each.split(".")[-2] in PROJECTIONS and ignored not in each]:
            module = name.removesuffix(".weight")
            made, wide[module] = layout(tensors.pop(name))
            tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in made.items()}
        save_file(tensors, path / "model.safetensors")
        configure(path, quantization)
        return path, wide

    return make


def configure(path: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))


def change(path: Path, **changes: Tensor | None) -> None:
    """Replaces tensors of the first layer's down_proj, or takes them away."""
    tensors = load_file(path / "model.safetensors")
    for kind, tensor in changes.items():
        name = f"model.layers.0.mlp.down_proj.{kind}"
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor.contiguous()
    save_file(tensors, path / "model.safetensors")


def load(path: Path, parallel: Parallel | None = None) -> LoadedModel:
    return load_model(
        path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0, parallel=parallel
    )


def layers_of(loaded: LoadedModel) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """A layer's methods, with the projections that each has."""
    attention, mlp = loaded.model.layers[1].attention, loaded.model.layers[1].mlp
    return {
        "self_attn": (attention.qkv.method, ("q_proj", "k_proj", "v_proj")),
        "self_attn.output": (attention.output.method, ("o_proj",)),
        "mlp": (mlp.gate_up.method, ("gate_proj", "up_proj")),
        "mlp.down": (mlp.down.method, ("down_proj",)),
    }


@pytest.mark.parametrize("name", FORMATS)
def test_layers_multiply_with_the_numbers_that_are_stored(name: str, stored, tiny_model, make_runner, make_driver):
    layout, quantization, kind, limit = FORMATS[name]
    path, wide = stored(layout, quantization)
    loaded = load(path)
    assert loaded.quantization == f"{kind} as stored"
    torch.manual_seed(0)
    for place, (method, parts) in layers_of(loaded).items():
        expected = torch.cat([wide[f"model.layers.1.{place.split('.')[0]}.{part}"] for part in parts])
        columns = expected.shape[1]
        with torch.inference_mode():
            numbers = method.apply(torch.eye(columns)).t()
            x = torch.randn(3, columns)
            product = method.apply(x)
        # A one is rounded to itself. NVFP4's scale is divided here, multiplied there: the last bit of float32.
        torch.testing.assert_close(numbers, expected, rtol=2e-7 if "NVFP4" in name or limit else 0, atol=1e-12)
        assert (product - x @ expected.t()).norm() < max(limit, 1e-6) * product.norm()
    tiny = tiny_model("wide")
    oracle = type(tiny.oracle)(tiny.oracle.config).eval()
    oracle.load_state_dict(tiny.oracle.state_dict() | {f"{module}.weight": weight for module, weight in wide.items()})
    tokens = list(range(3, 40))
    driver = make_driver(make_runner(path))
    driver.add(0, tokens)
    ours = driver.runner.logits(driver.output({0: len(tokens)}))
    with torch.inference_mode():
        theirs = oracle(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).norm() < max(4 * limit, 1e-5) * theirs.norm()


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (layouts.gptq, gptq(lm_head=True)),
        (layouts.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
        (layouts.pack_quantized, compressed(INT4)),
        (layouts.nf4, BNB),
        (partial(layouts.float8, block=(1, 128)), compressed(FLOAT8)),
    ],
)
def test_a_quantised_output_head_is_read_as_it_is_stored(
    layout, settings, tiny_model, make_runner, make_driver, tmp_path
):
    tiny = tiny_model("wide", vocab_size=128)
    shutil.copytree(tiny.path, tmp_path / "stored")
    path = tmp_path / "stored"
    tensors = load_file(path / "model.safetensors")
    made, wide = layout(tensors.pop("lm_head.weight"))
    save_file(
        tensors | {f"lm_head.{kind}": each.contiguous() for kind, each in made.items()}, path / "model.safetensors"
    )
    configure(path, settings)
    tokens = list(range(3, 40))
    driver = make_driver(make_runner(path))
    driver.add(0, tokens)
    ours = driver.runner.logits(driver.output({0: len(tokens)}))
    oracle = type(tiny.oracle)(tiny.oracle.config).eval()
    oracle.load_state_dict(tiny.oracle.state_dict() | {"lm_head.weight": wide})
    with torch.inference_mode():
        theirs = oracle(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


RANKS = [
    *("gptq", "gptq one group a row", "gptq 8 bits", "awq", "W4A16 asym", "W8A16 plain", "W8A8"),
    *("float8 weights by tensor", "MXFP4", "modelopt NVFP4", "NF4 nested"),
]


@pytest.mark.parametrize("name", RANKS)
def test_ranks_read_their_parts(name: str, stored):
    layout, quantization, _, limit = FORMATS[name]
    path, wide = stored(layout, quantization)
    half = Parallel(tp=ThreadGroup(1, [torch.empty(0)] * 2, threading.Barrier(2)))
    methods = layers_of(load(path, half))
    for place, part, dim in (
        ("self_attn.output", "self_attn.o_proj", 1),
        ("mlp.down", "mlp.down_proj", 1),
        ("mlp", "", 0),
    ):
        method = methods[place][0]
        if dim == 0:
            gate, up = (wide[f"model.layers.1.mlp.{each}_proj"].chunk(2)[1] for each in ("gate", "up"))
            expected = torch.cat((gate, up))
        else:
            expected = wide[f"model.layers.1.{part}"].chunk(2, 1)[1]
        with torch.inference_mode():
            numbers = method.apply(torch.eye(expected.shape[1])).t()
        torch.testing.assert_close(numbers, expected, rtol=2e-7 if "NVFP4" in name or limit else 0, atol=1e-12)


def test_projections_of_different_schemes_in_one_layer_are_each_read_as_stored(stored):
    path, wide = stored(layouts.pack_quantized, compressed(INT4), ignored="k_proj")
    tensors = load_file(path / "model.safetensors")
    for name in [each for each in tensors if ".v_proj." in each]:
        tensors.pop(name)
    plain = load_file(path.parent / "stored" / "model.safetensors")
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn.v_proj"
        made, wide[module] = layouts.int8(wide[module])
        tensors |= {f"{module}.{kind}": tensor for kind, tensor in made.items()}
    save_file(tensors, path / "model.safetensors")
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4},
        "group_1": {"targets": ["re:.*v_proj$"], "weights": INT8, "input_activations": INT8},
    }
    configure(path, {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups})
    method = layers_of(load(path))["self_attn"][0]
    expected = torch.cat(
        [
            wide["model.layers.1.self_attn.q_proj"],
            plain["model.layers.1.self_attn.k_proj.weight"],
            wide["model.layers.1.self_attn.v_proj"],
        ]
    )
    with torch.inference_mode():
        numbers = method.apply(torch.eye(expected.shape[1])).t()
    torch.testing.assert_close(numbers, expected, rtol=2e-7, atol=0)


def test_a_bias_that_the_model_has_not_is_added_where_the_checkpoint_stores_one(stored):
    path, wide = stored(layouts.gptq, gptq())
    tensors = load_file(path / "model.safetensors")
    bias = torch.randn(128).half()
    tensors["model.layers.1.mlp.down_proj.bias"] = bias
    save_file(tensors, path / "model.safetensors")
    method = layers_of(load(path))["mlp.down"][0]
    x = torch.randn(2, 256)
    with torch.inference_mode():
        torch.testing.assert_close(
            method.apply(x), x @ wide["model.layers.1.mlp.down_proj"].t() + bias, rtol=1e-4, atol=1e-4
        )


DOWN = r"model\.layers\.0\.mlp\.down_proj"


@pytest.mark.parametrize(
    ("name", "changes", "settings", "message"),
    [
        ("gptq", {"scales": None}, {}, rf"tensor {DOWN}\.scales \(missing, gptq\)"),
        ("gptq", {"qzeros": None}, {}, rf"tensor {DOWN}\.qzeros \(missing, gptq\)"),
        ("gptq", {}, {"group_size": 64}, r"scales \(F16 \[4, 256\], gptq\): its groups are of 32 inputs, group_size is 64"),
        ("gptq", {"scales": torch.ones(5, 128).half()}, {}, rf"{DOWN}\.scales .*groups are of 52 inputs"),
        ("gptq", {"qweight": torch.ones(24, 128).int()}, {"bits": 3}, rf"{DOWN}\.qweight .*GPTQ of 3 bits"),
        ("gptq", {"qzeros": torch.ones(8, 15).int()}, {}, rf"{DOWN}\.qzeros .*should be \[8, 16\]"),
        ("gptq", {"g_idx": None}, {"desc_act": True}, rf"{DOWN}\.g_idx .*is missing"),
        ("gptq", {"g_idx": torch.zeros(256).int()}, {"desc_act": True}, rf"{DOWN}\.g_idx .*groups are not all of 32"),
        ("awq", {}, {"version": "gemv"}, "AWQ version gemv of 4 bits"),
        ("awq", {"scales": None}, {}, rf"{DOWN}\.scales \(missing, awq\)"),
        ("awq", {}, {"group_size": 64}, r"q_proj\.qzeros .*should be \[2, 32\]"),
        ("W4A16", {"weight_scale": None}, {}, rf"{DOWN}\.weight_scale \(missing, compressed-tensors\)"),
        ("W4A16", {"weight_packed": torch.ones(128, 24).int()}, {}, rf"{DOWN}\.weight_packed .*4 and 8 bits"),
        ("W4A16", {}, {"quant_method": "fp8"}, "config_groups .*is a setting that nothing here reads"),
        ("float8 blocks", {}, {"weight_block_size": [64, 64]}, "blocks of 64 x 64 need"),
        ("float8 blocks", {}, {"weight_block_size": [128]}, r"weight_block_size of config.json is \[128\]; it can be"),
        ("float8 blocks", {}, {"activation_scheme": "group"}, "activation_scheme of config.json is 'group'; it can be 'dyn"),
        ("W8A8", {"weight_scale": None}, {}, rf"{DOWN}\.weight_scale \(missing"),
        ("float8 weights by row", {"weight_scale": torch.ones(7, 1)}, {}, rf"{DOWN}\.weight_scale .*need \[1, 2\] scales"),
        ("NVFP4", {"weight_global_scale": None}, {}, rf"{DOWN}\.weight_scale_2 \(missing"),
        ("NF4", {"weight.absmax": None}, {}, rf"{DOWN}\.weight\.absmax \(missing, bitsandbytes\)"),
        ("NF4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(5).byte()}, {}, "holds no sizes"),
    ],
)  # fmt: skip
def test_what_is_broken_or_unknown_is_named(name: str, changes, settings, message: str, stored):
    layout, quantization, _, _ = FORMATS[name]
    path, _ = stored(layout, quantization | settings)
    change(path, **changes)
    with pytest.raises(ConfigError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("method", ["torchao", "hqq", "quark", "foo"])
@pytest.mark.parametrize("name", ["W4A16", "float8 blocks"])
def test_an_unread_way_of_quantising_is_named_for_tensors_of_any_look(name: str, method: str, stored):
    path, _ = stored(FORMATS[name][0], {"quant_method": method, "weight_block_size": [128, 128]})
    with pytest.raises(ConfigError) as raised:
        load(path)
    known = "awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, gptqmodel, modelopt, mxfp4, sparseml"
    assert str(raised.value) == (
        f"{path}: quantization_config.quant_method of config.json is {method!r}; "
        f"weights quantised in these ways can be read: {known}"
    )


def test_modelopt_s_own_file_names_the_scheme_where_the_configuration_does_not(stored):
    path, wide = stored(partial(layouts.float8, block=None), {})
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (path / "hf_quant_config.json").write_text(json.dumps(own))
    loaded = load(path)
    assert loaded.quantization == "fp8 as stored"
    expected = wide["model.layers.1.mlp.down_proj"]
    x = torch.randn(4, expected.shape[1])
    with torch.inference_mode():
        error = (loaded.model.layers[1].mlp.down(x) - x @ expected.t()).norm() / (x @ expected.t()).norm()
    assert 0.005 < error < 0.1  # activations are rounded


def test_an_output_head_in_few_bits_with_more_rows_than_tokens_is_named(stored):
    path, _ = stored(layouts.gptq, gptq())
    tensors = load_file(path / "model.safetensors")
    made, _ = layouts.gptq(torch.nn.functional.pad(tensors.pop("lm_head.weight"), (0, 0, 0, 7)))
    save_file(tensors | {f"lm_head.{kind}": tensor for kind, tensor in made.items()}, path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"tensor lm_head\.qweight \(I32 \[16, 104\], gptq\): its shape should be \[16, 97\]"
    ):
        load(path)


def test_layers_in_order_of_importance_cannot_be_split_by_their_inputs(stored):
    path, _ = stored(*FORMATS["gptq desc_act"][:2])
    half = Parallel(tp=ThreadGroup(1, [torch.empty(0)] * 2, threading.Barrier(2)))
    with pytest.raises(ConfigError, match=r"o_proj\.g_idx .*cannot be split by its inputs"):
        load(path, half)
