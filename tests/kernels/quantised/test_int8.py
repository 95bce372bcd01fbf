"""Weights in int8 by a scale a row that float16 holds: how they are rounded, and products with rows as they are."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.native.products import load_library
from sapwood_kernels.quantised.cpu_grouped import packed_weight
from sapwood_kernels.quantised.int8 import round_weight, weight_product

NATIVE = load_library()


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


def test_rows_are_rounded_to_the_nearest_by_scales_that_float16_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sapwood_kernels.quantised.int8._CHUNK", 3 * 40)  # three rows at a time
    weight = torch.randn(8, 40) * torch.logspace(-2, 3, 8)[:, None]
    weight[2] = 0
    codes, scales = round_weight(weight.bfloat16())
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32 and torch.equal(scales, scales.half().float())
    assert codes.abs().amax(1).tolist() == [127, 127, 0, *[127] * 5]
    far = (codes * scales - weight.bfloat16().float()).abs() / scales
    assert (far[[0, 1, 3, 4, 5, 6, 7]] <= 0.57).all(), "half a step, and what the largest loses by the scale's rounding"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("count", [1, 5, 30])
def test_products_are_those_of_the_rounded_numbers(count: int, normed: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sapwood_kernels.quantised.int8._CHUNK", 64 * 20)  # twenty rows at a time
    torch.manual_seed(count)
    codes, scales = round_weight(torch.randn(50, 64))
    x = torch.randn(count, 128)[:, 64:]
    norm = (torch.rand(64) + 0.5, 1e-5) if normed else None
    wanted = (x if norm is None else reference.rms_norm(x, *norm)) @ (codes * scales).t()
    assert error_of(weight_product(x, codes, scales, norm=norm), wanted) < 1e-6
    half = weight_product(x.bfloat16(), codes, scales, norm=norm)
    assert half.dtype == torch.bfloat16 and error_of(half, wanted) < 0.01
    assert weight_product(x.bfloat16(), codes, scales, dtype=torch.float32).dtype == torch.float32
    if NATIVE is None:
        pytest.skip("no compiled library")
    packed = packed_weight(NATIVE, codes.clone(), scales)
    assert error_of(packed(x, norm=norm), wanted) < 5e-5, "16 bits of the largest of 32 numbers"
    assert packed(x.bfloat16(), norm=norm, dtype=torch.float32).dtype == torch.float32
