"""Products of rows in two digits with an int8 weight against plain torch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
triton_digits = pytest.importorskip("sapwood_kernels.quantised.triton_digits")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-4
"""Of a row's largest number 2^-16 is lost, and that is some times the size of the others."""


def drawn(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 weight and its scales."""
    codes = torch.randint(-127, 128, (rows, columns), device=DEVICE).to(torch.int8)
    return codes, torch.rand(rows, 1, device=DEVICE) + 0.5


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 130, 256), (3, 128, 320), (17, 100, 64), (40, 257, 128)])
def test_products_are_those_of_float32(count: int, rows: int, columns: int, normed: bool):
    torch.manual_seed(count)
    codes, scales = drawn(rows, columns)
    x = torch.randn(count, 2 * columns, device=DEVICE).bfloat16()[:, columns:]  # rows that lie apart
    norm = (torch.rand(columns, device=DEVICE) + 0.5, 1e-5) if normed else None
    taken = x.float() if norm is None else reference.rms_norm(x.float(), *norm)
    got = triton_digits.product(x, codes, scales, norm=norm, dtype=torch.float32)
    assert got.dtype == torch.float32
    assert error_of(got, taken @ (codes.float() * scales).t()) < NEAR
    assert triton_digits.product(x, codes, scales, norm=norm).dtype == torch.bfloat16


@pytest.mark.parametrize("tile", [(16, 64, 32, 4, 2), (32, 32, 128, 4, 3)])
def test_any_tile_gives_the_same(tile: tuple[int, int, int, int, int]):
    torch.manual_seed(0)
    codes, scales = drawn(100, 192)
    x = torch.randn(50, 192, device=DEVICE)
    one, other = (triton_digits.product(x, codes, scales, tile=each) for each in (triton_digits.Tile(*tile), None))
    assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter makes NaN a whole number
def test_numbers_of_all_sizes_become_digits_and_what_is_no_number_stays_none():
    x = torch.tensor([[1.0, -1.0, 0.5, 2.0**-15], [0, 0, 0, 0], [1e30, -3e38, 1e-30, 1], [float("nan"), 1, 2, 3]])
    digits, units = triton_digits.digits_of(x.to(DEVICE), None)
    whole = digits[::2].float() * 256 + digits[1::2].float()
    torch.testing.assert_close(whole[:3] * units[:3, None], x[:3].to(DEVICE), rtol=0, atol=3e38 / 65000)
    assert whole[0].tolist() == [32512, -32512, 16256, 1] and not whole[1].any()
    assert units[3].isnan()
    wide = torch.nn.functional.pad(x, (0, 12)).to(DEVICE)
    one = torch.ones(1, 16, dtype=torch.int8, device=DEVICE)
    got = triton_digits.product(wide, one, torch.ones(1, 1, device=DEVICE))
    assert got[3].isnan() and got[:3].isfinite().all()
