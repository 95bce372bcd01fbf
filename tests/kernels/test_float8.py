"""Linear layers in float8: quantising kernels against the reference (on a GPU, else in Triton's interpreter), and the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.float8_linear import Float8Linear, Scaling
from sapwood_kernels.ops.factory import device_ops

pytest.importorskip("triton", reason="Triton is not installed")
kernel = pytest.importorskip("sapwood_kernels.triton_float8")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = device_ops(DEVICE)


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


QUANTISE = {
    "row": reference.quantise_rows,
    "block": lambda x: reference.quantise_rows(x, 128),
    "tensor": reference.quantise_tensor,
}


@pytest.mark.parametrize("scaling", ["row", "block", "tensor"])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_near_the_whole_one_and_nearer_to_its_rounded_numbers(rows: int, scaling: Scaling, biased: bool):
    torch.manual_seed(rows)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weight, x = torch.randn(256, 384).to(dtype), torch.randn(rows, 384).to(dtype)
    bias = torch.randn(256).to(dtype) if biased else None
    layer = Float8Linear(weight.to(DEVICE), None if bias is None else bias.to(DEVICE), OPS, scaling=scaling)
    result = layer(layer.quantise(x.to(DEVICE)))
    plain = 0.0 if bias is None else bias.float()
    assert relative(result, x.float() @ weight.float().t() + plain) < 0.05
    wide = reference.dequantise_blocks(*QUANTISE[scaling](x))
    rounded = reference.dequantise_blocks(layer.weight.cpu(), layer.scales.cpu())
    assert relative(result, wide @ rounded.t() + plain) < 0.006


@pytest.mark.parametrize("what", ["plain", "norm", "silu"])
def test_one_scale_for_all_tokens(what: str):
    torch.manual_seed(1)
    x = torch.randn(5, 256) * torch.tensor([1.0, 30.0, 0.1, 1.0, 1.0])[:, None]
    weight, factors = torch.randn(64, 128 if what == "silu" else 256), torch.rand(256) + 0.5
    layer = Float8Linear(weight.to(DEVICE), None, OPS, scaling="tensor")
    if what == "plain":
        got, expected = layer.quantise(x.to(DEVICE)), x
    elif what == "norm":
        got, expected = layer.norm(x.to(DEVICE), factors.to(DEVICE), 1e-5), reference.rms_norm(x, factors, 1e-5)
    else:
        got, expected = layer.gate(x.to(DEVICE), "silu"), reference.silu_mul(x)
    assert layer.scales.shape == got.scales.shape == (1, 1)
    assert torch.equal(layer.row_scales, layer.scales.expand(64, 1))
    torch.testing.assert_close(got.scales.cpu(), reference.quantise_tensor(expected)[1], rtol=1e-5, atol=0)
    assert relative(got.values.float() * got.scales, expected) < 0.05


def test_the_kernel_quantises_by_one_scale_as_the_reference():
    x = torch.randn(7, 384) * 3
    (values, scale), (rounded, wanted) = kernel.quantise_tensor(x.to(DEVICE)), reference.quantise_tensor(x)
    torch.testing.assert_close(scale.cpu(), wanted, rtol=1e-5, atol=0)
    near = torch.isclose(values.cpu().float(), rounded.float(), rtol=0.13, atol=0.01)
    assert float((~near).float().mean()) < (1e-9 if DEVICE == "cuda" else 0.07)


def test_blocks_have_a_scale_each_and_lose_less_where_sizes_differ():
    weight = torch.randn(256, 256)
    weight[:, :128] *= 1e5
    by_row, by_block = (Float8Linear(weight, None, device_ops("cpu"), scaling=scaling) for scaling in ("row", "block"))
    assert by_row.scales.shape == (256, 1)
    assert by_block.scales.shape == (2, 2)
    errors = [
        relative(reference.dequantise_blocks(each.weight, each.scales)[:, 128:], weight[:, 128:])
        for each in (by_row, by_block)
    ]
    assert errors[1] < errors[0] / 1.5
