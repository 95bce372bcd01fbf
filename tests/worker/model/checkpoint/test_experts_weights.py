"""Checkpoints of mixtures of experts: what is said of one that is damaged, or that we cannot compute with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models import quantised_layers as layouts
from sapwood_testing.worker.split_models import logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.loader import load_model

TOKENS = [3 + i * 7 % 90 for i in range(23)]
DOWN = "model.layers.1.mlp.experts.2.down_proj"


def load(path, **changes):
    options = {"context_length": None, "threads": 2, "seed": 0, **changes}
    return load_model(path, "auto", torch.float32, device_ops("cpu"), **options)


@pytest.fixture
def sparse(tiny_model, tmp_path):
    """A copy of a tiny model's directory, to be damaged."""
    return shutil.copytree(tiny_model("qwen2-moe").path, tmp_path / "sparse")


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_missing_expert_is_named(sparse):
    edit(sparse, lambda tensors: tensors.pop(f"{DOWN}.weight"))
    with pytest.raises(ConfigError, match=rf"sparse: tensor {DOWN}.weight is missing"):
        load(sparse)


def test_an_expert_too_many_is_named(sparse):
    name = DOWN.replace("experts.2", "experts.6")
    edit(sparse, lambda tensors: tensors.update({f"{name}.weight": torch.zeros(48, 24)}))
    with pytest.raises(ConfigError, match=rf"model.safetensors: tensor {name}.weight is unexpected"):
        load(sparse)


def test_an_expert_of_another_shape_is_named(sparse):
    edit(sparse, lambda tensors: tensors.update({f"{DOWN}.weight": torch.zeros(48, 25)}))
    with pytest.raises(
        ConfigError, match=rf"{DOWN}.weight has shape \[48, 25\], the configuration asks for \[48, 24\]"
    ):
        load(sparse)


@pytest.fixture
def float8(tiny_model, tmp_path):
    """A model whose experts are stored in float8 blocks, one of them no whole block, and the numbers that they stand for."""
    sizes = {"moe_intermediate_size": 256, "hidden_size": 160}
    path = shutil.copytree(tiny_model("qwen3-moe", **sizes).path, tmp_path / "float8")
    numbers = {}

    def to_float8(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            parts, numbers[name] = layouts.float8(tensors[name], block=(128, 128), name="weight_scale_inv")
            tensors |= {f"{name.removesuffix('.weight')}.{kind}": each.contiguous() for kind, each in parts.items()}

    edit(path, to_float8)
    return path, numbers


def test_experts_in_float8_blocks_stay_so(float8):
    path, numbers = float8
    kept, wide = load(path), load(path, stored_weights="widen")
    assert (kept.quantization, wide.quantization) == ("fp8 as stored", "none")
    held, widened = (each.model.weights() for each in (kept, wide))
    assert numbers
    for name, expected in numbers.items():
        assert name not in held, "nothing but the layer's product holds it"
        assert torch.equal(widened[name].target, expected)
    ours, theirs = (logits_of(each, TOKENS) for each in (kept, wide))
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_ranks_have_their_part_of_float8_experts(float8):
    path, _ = float8
    expected = logits_of(load(path), TOKENS)

    def work(group):
        parallel = Parallel(tp=group)
        loaded = load(path, parallel=parallel)
        return loaded.quantization, logits_of(loaded, TOKENS, parallel)

    for quantization, logits in run_ranks(2, work):
        assert quantization == "fp8 as stored"
        assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_a_missing_scale_is_named(float8):
    path, _ = float8
    name = "model.layers.1.mlp.experts.7.up_proj.weight_scale_inv"
    edit(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=rf"tensor {name} \(missing, "):
        load(path)


def test_experts_in_a_format_without_a_product_are_refused_by_name(sparse):
    def to_awq(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            stem = name.removesuffix(".weight")
            del tensors[name]
            tensors[f"{stem}.qweight"] = torch.zeros(4, 4, dtype=torch.int32)

    edit(sparse, to_awq)
    with pytest.raises(ConfigError, match=r"tensor model.layers.0.mlp.experts.0.gate_proj.qweight \(I32 \[4, 4\]"):
        load(sparse)


ROUTER = "model.layers.1.mlp.gate"


@pytest.mark.parametrize("name", [DOWN, ROUTER, "model.layers.1.self_attn.q_proj", "model.embed_tokens", "model.norm"])
@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float8_e4m3fn, r"F8_E4M3.*: its scales are missing"),
        (torch.float8_e5m2, r"F8_E5M2.*: its scales are missing"),
        (torch.bool, "BOOL.*: weights of this kind cannot be read"),
        (torch.int8, "I8.*: weights of this kind cannot be read"),
    ],
)
def test_numbers_that_mean_nothing_without_a_format_are_refused_by_name(sparse, name, dtype, message):
    """Also where ``config.json`` has no ``quantization_config``."""
    edit(sparse, lambda tensors: tensors.update({f"{name}.weight": tensors[f"{name}.weight"].to(dtype)}))
    with pytest.raises(ConfigError, match=rf"tensor {name}\.weight \({message}"):
        load(sparse)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_float8_with_scales_needs_no_quantization_config(sparse, name):
    """Here with one scale for all."""
    before = logits_of(load(sparse), TOKENS)

    def to_float8(tensors):
        wide = tensors[f"{DOWN}.weight"]
        scale = wide.abs().max() / 448
        tensors[f"{DOWN}.weight"] = (wide / scale).to(torch.float8_e4m3fn)
        tensors[f"{DOWN}.{name}"] = scale.view(1)

    edit(sparse, to_float8)
    after = logits_of(load(sparse), TOKENS)
    assert 0 < (after - before).abs().max() <= 0.1 * before.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_numbers_of_any_wide_type_are_read(sparse, dtype):
    before = logits_of(load(sparse), TOKENS)
    edit(sparse, lambda tensors: tensors.update({name: each.to(dtype) for name, each in tensors.items()}))
    assert (logits_of(load(sparse), TOKENS) - before).abs().max() <= 0.1 * before.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "a token cannot go to 9 of 6 experts"),
        ({"moe_intermediate_size": None}, r"the configuration asks for \[1408, 48\]"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
    ],
)
def test_settings_that_do_not_fit_are_named(sparse, changes, message):
    config = json.loads((sparse / "config.json").read_text()) | changes
    (sparse / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load(sparse)


def test_experts_are_read_into_their_places_alone(sparse):
    """Each tensor of the file is a view of one of two for the layer, so that loading needs no second copy of them."""
    slots = load(sparse).model.weights()
    with safe_open(sparse / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys() if ".layers.3.mlp.experts." in name}  # noqa: SIM118
    assert len(stored) == 18
    assert len({slots[name].target.untyped_storage().data_ptr() for name in stored}) == 2
    assert all(torch.equal(slots[name].target, tensor) for name, tensor in stored.items())


PEAK = """
import sys
from pathlib import Path
import torch
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.loader import load_model

def held():
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10

def read_into(self, name, slot):
    read(self, name, slot)
    found.append(held())

read, SafetensorsSource.read_into = SafetensorsSource.read_into, read_into
torch.ones(64, 64) @ torch.ones(64, 64)  # what torch sets up once
found = [held()]
model = load_model(
    Path(sys.argv[1]), "auto", torch.bfloat16, device_ops("cpu"), context_length=64, threads=1, seed=0
)
print(max(*found, held()) - found[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory in use")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_loading_takes_little_more_memory_than_the_model(tmp_path, dtype):
    """Shards of 300 MB, or 150 MB in float8; memory of the process's own, which the mapped files are not."""
    hidden, inner, experts, layers = 512, 512, 48, 4
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 512, "hidden_size": hidden, "intermediate_size": 512,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 64, "num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": inner,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def zeros(*sizes):
        return torch.zeros(*sizes, dtype=torch.bfloat16)

    index = {}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        tensors = {f"{stem}.{name}_layernorm.weight": zeros(hidden) for name in ("input", "post_attention")}
        tensors |= {f"{stem}.self_attn.{name}_norm.weight": zeros(64) for name in "qk"}
        tensors |= {
            f"{stem}.self_attn.{name}_proj.weight": zeros(size, hidden)
            for name, size in (("q", 256), ("k", 128), ("v", 128))
        }
        tensors |= {
            f"{stem}.self_attn.o_proj.weight": zeros(hidden, 256),
            f"{stem}.mlp.gate.weight": zeros(experts, hidden),
        }
        for name in (
            f"{stem}.mlp.experts.{expert}.{part}_proj" for expert in range(experts) for part in ("gate", "up", "down")
        ):
            tensors[f"{name}.weight"] = zeros(inner, hidden).to(dtype)
            if dtype != torch.bfloat16:
                tensors[f"{name}.weight_scale_inv"] = torch.ones(inner // 128, hidden // 128)
        if layer == 0:
            tensors |= {"model.embed_tokens.weight": zeros(512, hidden), "lm_head.weight": zeros(512, hidden)}
            tensors["model.norm.weight"] = zeros(hidden)
        file = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        save_file(tensors, tmp_path / file)
        index |= dict.fromkeys(tensors, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert 0.9 * size < int(done.stdout) < 1.1 * size
