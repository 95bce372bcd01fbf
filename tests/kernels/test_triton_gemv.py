"""The one-row linear kernel against plain torch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
triton_gemv = pytest.importorskip("sapwood_kernels.triton_gemv")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize(
    ("normed", "biased", "gate"), list(itertools.product((False, True), (False, True), (None, "silu", "gelu_tanh")))
)
@pytest.mark.parametrize(("width", "rows"), [(100, 37), (1500, 130)])
def test_one_row_equals_norm_product_and_gate_one_after_another(
    width: int, rows: int, normed: bool, biased: bool, gate: str | None
):
    torch.manual_seed(width)
    x, weight, factors = drawn(1, width), drawn(2 * rows, width), drawn(width)
    bias = drawn(2 * rows) if biased else None
    plain = reference.rms_norm(x, factors, 1e-6) if normed else x
    expected = torch.nn.functional.linear(plain, weight, bias)
    if gate is not None:
        expected = GATES[gate](expected)
    result = triton_gemv.gemv(x, weight, bias=bias, norm=(factors, 1e-6) if normed else None, gate=gate)
    assert (result - expected).norm() < 1e-5 * expected.norm()


def test_adds_in_place():
    x, weight, total = drawn(1, 64), drawn(50, 64), drawn(1, 50)
    expected = total + x @ weight.T
    assert triton_gemv.gemv(x, weight, add_to=total) is total
    torch.testing.assert_close(total, expected)


def test_the_result_may_be_wider_than_the_input():
    x, weight = drawn(1, 64).bfloat16(), drawn(50, 64).bfloat16()
    result = triton_gemv.gemv(x, weight, dtype=torch.float32)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, x.float() @ weight.float().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [(1, 16, 1), (4, 64, 2), (16, 128, 4)])
def test_any_tile_gives_the_same(blocks: tuple[int, int, int]):
    x, weight = drawn(1, 70), drawn(37, 70)
    torch.testing.assert_close(triton_gemv.gemv(x, weight, blocks=blocks), x @ weight.T)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_a_weight_of_float8_is_read_with_its_scales(gate: str | None, block: bool):
    width = 384
    x, weight = drawn(1, width), drawn(512, width) / width**0.5
    rounded, scales = reference.quantise_blocks(weight) if block else reference.quantise_rows(weight)
    norm = (torch.rand(width, device=DEVICE) + 0.5, 1e-5)
    expected = reference.rms_norm(x, *norm) @ reference.dequantise_blocks(rounded, scales).t()
    if gate is not None:
        expected = GATES[gate](expected)
    got = triton_gemv.gemv(x, rounded, scales=scales, norm=norm, gate=gate, blocks=(32, 128, 1))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
