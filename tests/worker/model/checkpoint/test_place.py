"""Projections that a checkpoint stores as one tensor are read apart, with their biases and scales."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sapwood_common.errors import ConfigError
from sapwood_kernels import reference
from sapwood_testing.models import quantised_layers as layouts
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.checkpoint.weights import Place, places
from sapwood_worker.model.families.dense.phi3 import PHI3
from sapwood_worker.model.weight_slot import Span, WeightSlot, whole

FUSED = {"self_attn.qkv_proj": {"self_attn.q_proj": 256, "self_attn.k_proj": 128, "self_attn.v_proj": 128}}
LAYER = "model.layers.0.self_attn."


def test_parts_are_found_by_what_a_tensor_holds_for_them():
    def part(kind, shape, name="k_proj"):
        return dict(places(f"{LAYER}qkv_proj.{kind}", Path("x"), f"a.qkv.{kind}", FUSED))[f"{LAYER}{name}.{kind}"].part(
            shape
        )

    assert part("weight", [512, 64]) == (0, Span(256, 128, 512))
    assert part("bias", [512]) == (0, Span(256, 128, 512))
    assert part("weight_scale", [512, 1]) == (0, Span(256, 128, 512))
    assert part("weight_scale_inv", [4, 1]) == (0, Span(2, 1, 4))  # of blocks
    assert part("weight_scale", [1]) is None and part("weight_scale", []) is None  # one for all
    assert part("weight_shape", [2]) is None and part("g_idx", [64]) is None
    assert part("qweight", [8, 512]) == (1, Span(256, 128, 512))  # of GPTQ: inputs are packed
    assert part("qweight", [64, 64], "v_proj") == (1, Span(48, 16, 64))  # of AWQ: outputs are
    assert Place(Path("x"), "stored").part([7, 7]) is None
    with pytest.raises(ConfigError, match=r"x: tensor a.qkv.weight has shape \[500, 64\].* the 512 rows"):
        part("weight", [500, 64])
    with pytest.raises(ConfigError, match=r"qkv.weight has shape \[16384, 1\]"):  # of bitsandbytes: flattened
        part("weight", [16384, 1])
    # Blocks that would lie across two projections.
    with pytest.raises(ConfigError, match=r"shape \[3, 1\]"):
        Place(Path("x"), "a.weight_scale", Span(192, 96, 384)).part([3, 1])


@pytest.mark.parametrize(
    "layout",
    [
        layouts.gptq, partial(layouts.gptq, bits=8), layouts.awq, layouts.pack_quantized,
        partial(layouts.pack_quantized, sym=False), layouts.int8, partial(layouts.float8, block=(128, 128)),
        partial(layouts.nvfp4, kind="compressed-tensors"), layouts.mxfp4,
    ],
    ids=["gptq", "gptq 8 bits", "awq", "W4A16", "W4A16 asym", "int8", "float8 blocks", "nvfp4", "mxfp4"],
)  # fmt: skip
def test_parts_of_a_quantised_projection_are_what_each_would_be_alone(tmp_path, layout):
    weight = torch.randn(512, 128)
    weight[:, 0] = 8.0  # more than any draw, so that a scale for all is the same for each
    tensors = {f"{LAYER}qkv_proj.{kind}": tensor.clone() for kind, tensor in layout(weight)[0].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, PHI3, tied=False, fused=FUSED)
    found = source.tensors()
    for name, rows in {"q_proj": slice(0, 256), "k_proj": slice(256, 384), "v_proj": slice(384, 512)}.items():
        alone = layout(weight[rows])[0]
        for kind, expected in alone.items():
            ours = f"{LAYER}{name}.{kind}"
            assert found[ours].shape == expected.shape
            target = torch.empty_like(expected)
            source.read_into(ours, WeightSlot(target))
            if kind != "weight_shape":
                assert torch.equal(target.view(torch.uint8), expected.contiguous().view(torch.uint8)), ours


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
