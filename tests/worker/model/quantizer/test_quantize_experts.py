"""`sapwood model quantize` of mixtures of experts: what is written is read to the numbers that were rounded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.split_models import logits_of
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.quantizer.quantize import quantize
from sapwood_worker.model.quantizer.schemes import scheme

PIECES = [[3 + (i * step) % 90 for i in range(120)] for step in (7, 11, 13)]


def load(path):
    ops = device_ops("cpu")
    return load_model(path, "auto", torch.float32, ops, context_length=None, threads=1, seed=0)


def rounded(path, out, name, calibration=()):
    return quantize(
        path, out, scheme(name, 32), calibration=calibration, measured=PIECES[2:], device="cpu", threads=1,
        progress=lambda *_: None,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_experts_are_written_as_they_are_read(tiny_model, tmp_path, name):
    path = tiny_model("qwen3-moe", hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2).path
    done = rounded(path, tmp_path / "out", name)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kind = "weight_packed" if name == "int4" else "weight"
    experts = [each for each in stored if ".experts." in each and each.endswith(kind)]
    wanted = load(path).config.sparse.routing.experts * 3  # of one of the two layers
    assert (
        len(experts) == wanted
        and all(not stored[each].is_floating_point() for each in experts)
        and not any("experts" in each for each in done.wide)
    )
    assert stored["model.layers.1.mlp.gate.weight"].is_floating_point(), "routers stay as they are"
    loaded, whole = load(tmp_path / "out"), load(path)
    assert "compressed-tensors as stored" in loaded.quantization
    ours, theirs = (logits_of(each, PIECES[0]) for each in (loaded, whole))
    assert 0.001 < (ours - theirs).norm() / theirs.norm() < 0.8


def test_experts_that_are_calibrated_are_nearer(tiny_model, tmp_path):
    path = tiny_model("qwen3-moe", hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2).path
    rounded(path, tmp_path / "nearest", "int4")
    rounded(path, tmp_path / "gptq", "int4", PIECES[:2])
    whole = logits_of(load(path), PIECES[0])
    nearest, gptq = (logits_of(load(tmp_path / each), PIECES[0]) for each in ("nearest", "gptq"))
    assert (gptq - whole).norm() < (nearest - whole).norm()


def test_joined_experts_are_refused(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="stored joined"):
        rounded(tiny_model("gpt-oss").path, tmp_path / "out", "int8")
