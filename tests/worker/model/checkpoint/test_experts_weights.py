"""Checkpoints of mixtures of experts: what is said of one that is damaged, or that we cannot compute with."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sapwood_common.errors import ConfigError
from sapwood_kernels import reference
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.quantizer.quantize import quantize
from sapwood_worker.model.quantizer.schemes import scheme

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


def test_experts_in_float8_are_widened_as_they_are_read(sparse):
    weights = {}

    def to_float8(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            # The blocks of 128 x 128 of the published checkpoints; here one holds it all.
            scale = (tensors[name].abs().max() / 448).view(1, 1)
            tensors[name] = reference.quantise(tensors[name], scale)
            tensors[f"{name}_scale_inv"] = scale
            weights[name] = tensors[name].float() * scale

    edit(sparse, to_float8)
    slots = load(sparse).model.weights()
    assert weights
    for name, expected in weights.items():
        assert torch.equal(slots[name].target, expected)


def test_experts_in_a_format_without_a_product_are_refused_by_name(sparse):
    def to_awq(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            stem = name.removesuffix(".weight")
            del tensors[name]
            tensors[f"{stem}.qweight"] = torch.zeros(4, 4, dtype=torch.int32)

    edit(sparse, to_awq)
    with pytest.raises(ConfigError, match=r"tensor model.layers.0.mlp.experts.0.gate_proj.qweight \(I32 \[4, 4\]"):
        load(sparse)


def test_experts_are_not_quantised_and_that_is_said(sparse, tmp_path):
    with pytest.raises(ConfigError, match="--quantization int8: experts cannot be quantised"):
        load(sparse, quantization="int8")
    with pytest.raises(ConfigError, match="mixtures of experts cannot be quantised"):
        quantize(sparse, tmp_path / "target", scheme("int8"), calibration=(), measured=(),
                 device="cpu", threads=1, progress=lambda *_: None)  # fmt: skip


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
