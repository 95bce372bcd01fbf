"""Projections that a checkpoint stores as one tensor are read apart, with their biases and scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sapwood_common.errors import ConfigError
from sapwood_kernels import reference
from sapwood_worker.model.checkpoint.place import Place, places
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.families.dense.phi3 import PHI3
from sapwood_worker.model.weight_slot import Span, WeightSlot, whole

FUSED = {"self_attn.qkv_proj": {"self_attn.q_proj": 256, "self_attn.k_proj": 128, "self_attn.v_proj": 128}}
LAYER = "model.layers.0.self_attn."


def test_rows_are_found_by_what_a_tensor_holds_for_them():
    key = dict(places(f"{LAYER}qkv_proj.weight", Path("x"), "stored", FUSED))[f"{LAYER}k_proj.weight"]
    assert key.span([512, 64]) == Span(256, 128, 512)
    assert key.span([512]) == Span(256, 128, 512)  # a bias, or scales of rows
    assert key.span([4, 1]) == Span(2, 1, 4)  # scales of blocks
    assert key.span([1]) is None and key.span([]) is None  # one scale for all
    assert Place(Path("x"), "stored").span([7, 7]) is None
    with pytest.raises(
        ConfigError, match=r"x: tensor stored has shape \[500, 64\], the configuration asks for 512 rows"
    ):
        key.span([500, 64])
    # Blocks that would lie across two projections.
    with pytest.raises(ConfigError, match=r"shape \[3, 1\]"):
        Place(Path("x"), "stored", Span(192, 96, 384)).span([3, 1])


@pytest.mark.parametrize("scales", ["row", "tensor", "block"])
@pytest.mark.parametrize("start", [0, 64])
def test_float8_is_widened_with_the_scales_of_its_rows(tmp_path, scales, start):
    weight = torch.randn(512, 256)
    make = {"row": reference.quantise_rows, "tensor": reference.quantise_tensor, "block": reference.quantise_blocks}
    stored, factors = make[scales](weight)
    name = f"{LAYER}qkv_proj.weight"
    suffix = "_scale_inv" if scales == "block" else "_scale"
    save_file(
        {name: stored, name + suffix: factors, f"{LAYER}qkv_proj.bias": weight[:, 0].clone()},
        tmp_path / "model.safetensors",
    )
    source = SafetensorsSource(tmp_path, PHI3, tied=False, fused=FUSED)
    found = source.tensors()
    assert found[f"{LAYER}k_proj.weight"].shape == (128, 256)
    assert found[f"{LAYER}k_proj.weight{suffix}"].scales
    expected = reference.dequantise_blocks(stored, factors)[256 + start : 320 + start, 128:]
    target, bias = torch.empty(64, 128), torch.empty(64)
    source.read_into(f"{LAYER}k_proj.weight", WeightSlot(target, spans=(Span(start, 64, 128), Span(128, 128, 256))))
    torch.testing.assert_close(target, expected)
    source.read_into(f"{LAYER}k_proj.bias", WeightSlot(bias, spans=(Span(start, 64, 128),)))
    assert torch.equal(bias, weight[256 + start : 320 + start, 0])
    all_rows = torch.empty(128, 256)
    source.read_into(f"{LAYER}v_proj.weight", WeightSlot(all_rows, spans=(whole(128), whole(256))))
    torch.testing.assert_close(all_rows, reference.dequantise_blocks(stored, factors)[384:])
