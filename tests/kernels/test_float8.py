"""Linear layers in float8: quantising kernels against the reference (on a GPU, else in Triton's interpreter), and the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.float8_linear import Float8Linear

pytest.importorskip("triton", reason="Triton is not installed")
kernel = pytest.importorskip("sapwood_kernels.triton_float8")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.cpu().float() - wanted.cpu().float()).norm() / wanted.cpu().float().norm())


@pytest.mark.parametrize("kind", ["plain", "norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (5, 384), (8, 1280)])
def test_activations_are_rounded_by_their_own_scales(rows: int, width: int, grouped: bool, kind: str):
    torch.manual_seed(rows)
    x = torch.randn(rows, width * (2 if kind in ("silu", "gelu_tanh") else 1)) * 10
    weight = torch.rand(width) + 0.5
    on, scale = x.to(DEVICE), weight.to(DEVICE)
    if kind == "plain":
        expected, (values, scales) = x, kernel.quantise(on, grouped=grouped)
    elif kind == "norm":
        expected, (values, scales) = (
            reference.rms_norm(x, weight, 1e-5),
            kernel.rms_norm(on, scale, 1e-5, grouped=grouped),
        )
    else:
        gate = reference.silu_mul if kind == "silu" else reference.gelu_tanh_mul
        expected, (values, scales) = gate(x), kernel.gated(on, kind, grouped=grouped)
    rounded, wanted = reference.quantise_rows(expected, 128 if grouped else None)
    torch.testing.assert_close(scales[:rows].cpu(), wanted, rtol=1e-5, atol=0)
    # The interpreter halves what is to be rounded up to a power of 2: one number of 32.
    near = torch.isclose(values[:rows].cpu().float(), rounded.float(), rtol=0.13, atol=0.01)
    assert float((~near).float().mean()) < (1e-9 if DEVICE == "cuda" else 0.07)
    got = reference.dequantise_blocks(values[:rows].cpu(), scales[:rows].cpu())
    assert relative(got, expected) < (0.05 if DEVICE == "cuda" else 0.25)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_near_the_whole_one_and_nearer_to_its_rounded_numbers(rows: int, block: bool, biased: bool):
    torch.manual_seed(rows)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weight, x = torch.randn(256, 384).to(dtype), torch.randn(rows, 384).to(dtype)
    bias = torch.randn(256).to(dtype) if biased else None
    layer = Float8Linear(weight.to(DEVICE), None if bias is None else bias.to(DEVICE), block=block)
    result = layer(layer.quantise(x.to(DEVICE)))
    plain = 0.0 if bias is None else bias.float()
    assert relative(result, x.float() @ weight.float().t() + plain) < 0.05
    wide = reference.dequantise_blocks(*reference.quantise_rows(x, 128 if block else None))
    rounded = reference.dequantise_blocks(layer.weight.cpu(), layer.scales.cpu())
    assert relative(result, wide @ rounded.t() + plain) < 0.006


def test_blocks_have_a_scale_each_and_lose_less_where_sizes_differ():
    weight = torch.randn(256, 256)
    weight[:, :128] *= 1e5
    by_row, by_block = (Float8Linear(weight, None, block=block) for block in (False, True))
    assert by_row.scales.shape == (256, 1)
    assert by_block.scales.shape == (2, 2)
    errors = [
        relative(reference.dequantise_blocks(each.weight, each.scales)[:, 128:], weight[:, 128:])
        for each in (by_row, by_block)
    ]
    assert errors[1] < errors[0] / 1.5
