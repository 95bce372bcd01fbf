"""Kernels that quantise activations to float8, against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference

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


def test_the_kernel_quantises_by_one_scale_as_the_reference():
    x = torch.randn(7, 384) * 3
    (values, scale), (rounded, wanted) = kernel.quantise_tensor(x.to(DEVICE)), reference.quantise_tensor(x)
    torch.testing.assert_close(scale.cpu(), wanted, rtol=1e-5, atol=0)
    near = torch.isclose(values.cpu().float(), rounded.float(), rtol=0.13, atol=0.01)
    assert float((~near).float().mean()) < (1e-9 if DEVICE == "cuda" else 0.07)
