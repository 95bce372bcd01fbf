"""Triton: products of 16-bit rows with a weight in int8 by a scale for each of its rows, an RMSNorm before it if wanted.

Nothing of the weight is widened: a row of inputs becomes whole numbers of 16 bits of its largest, in two digits of a byte, which
lie as two rows, and tensor cores multiply bytes, twice as fast as bfloat16's. Sums of each digit are exact in int32; the two,
which a thread holds side by side, make one output. So inputs lose at most 2^-16 of a row's largest number, and any number of
rows reads the weight in its stored format.

Bound: up to some hundred rows one read of the weight, O(N K); from there on the products, O(T N K).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from sapwood_kernels import dependent_launch

_LARGEST = tl.constexpr(32512.0)  # 127 times 256: the most that a row's largest becomes
_TINY = tl.constexpr(0x0DA24260)  # 1e-30 as bits
_AHEAD = 512
"""Columns of a tile's weights that come to the L2 cache while the kernel ahead runs."""


@triton.jit
def _digits_kernel(
    x, norm, digits, units, eps, x_stride, K: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < K
    factor = 1.0
    weight = tl.zeros((BLOCK,), tl.float32)
    if HAS_NORM:
        weight = tl.load(norm + at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
        values *= weight
    # As whole numbers sizes are in the same order, and what is not a number is the largest.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    unit = tl.maximum(largest, _TINY).to(tl.float32, bitcast=True) / _LARGEST
    whole = tl.floor(values / unit + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    tl.store(digits + 2 * row * K + at, high.to(tl.int8), mask=inside)
    tl.store(digits + (2 * row + 1) * K + at, (whole - high * 256).to(tl.int8), mask=inside)
    tl.store(units + row, unit * factor)


@triton.jit
def _fetch(at):
    """Has 128 bytes from each of these addresses come to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["T"])
def _product_kernel(
    digits, units, weight, codes, scales, out, T, N, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs that follow each other have the same rows of the weight.
    across = tl.cdiv(T, BLOCK_T)
    first_t = tl.program_id(0) % across * BLOCK_T
    first_n = tl.program_id(0) // across * BLOCK_N
    rows = first_n + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        line = tl.minimum(tl.arange(0, AHEAD // 128) * 128, K - 1)
        _fetch(codes + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + line[None, :])
        gdc_wait()
    total = tl.zeros((BLOCK_N, 2 * BLOCK_T), tl.int32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        total = tl.dot(weight.load([first_n, start]), digits.load([2 * first_t, start]).T, total, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(total, (BLOCK_N, BLOCK_T, 2)))
    each = first_t + tl.arange(0, BLOCK_T)
    there_n, there_t = (rows < N)[:, None], (each < T)[None, :]
    scale = tl.load(scales + rows[:, None], mask=there_n, other=0.0) * tl.load(
        units + each[None, :], mask=there_t, other=0.0
    )
    result = (high.to(tl.float32) * 256.0 + low.to(tl.float32)) * scale
    at = each.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=there_n & there_t)


class Tile(NamedTuple):
    """What a program takes.

    Attributes:
        inputs: Rows of inputs.
        rows: Rows of the weight.
        columns: Inputs of a step of its loop.
        warps: Of a program.
        stages: Steps whose weights are under way at once.
    """

    inputs: int
    rows: int
    columns: int
    warps: int
    stages: int


def block_shape(count: int) -> Tile:
    """The part of the weight that a program computes, for this many rows of inputs. Measured for an 8B model's head on an
    H200."""
    if count <= 8:
        return Tile(8, 128, 256, 4, 3)
    if count <= 16:
        return Tile(16, 128, 128, 4, 4)
    if count <= 32:
        return Tile(32, 128, 128, 4, 3)
    return Tile(64, 128, 128, 4, 3)


def serves(weight: Tensor) -> bool:
    """Whether the copy engine takes its rows, and sums of a digit's products are exact."""
    return weight.shape[1] % 16 == 0 and weight.shape[1] < 1 << 17


def digits_of(x: Tensor, norm: tuple[Tensor, float] | None) -> tuple[Tensor, Tensor]:
    """Rows [T, K], normed first, in two digits: int8 [2 T, K], where row 2 t counts 256 times as much as row 2 t + 1, and each
    row's scale, float32 [T]."""
    count, width = x.shape
    digits = torch.empty(2 * count, width, dtype=torch.int8, device=x.device)
    units = torch.empty(count, dtype=torch.float32, device=x.device)
    weight, eps = norm or (x, 0.0)
    block = triton.next_power_of_2(width)
    _digits_kernel[(count,)](
        x, weight, digits, units, eps, x.stride(0), width, HAS_NORM=norm is not None, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), **dependent_launch.options(x),
    )  # fmt: skip
    return digits, units


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``norm(x) @ (weight * scales).T``.

    Args:
        x: [T, K]; rows may lie apart.
        weight: int8 [N, K], contiguous, one that :func:`serves`.
        scales: float32 [N, 1].
        norm: An RMSNorm's weight, float32 [K], and eps.
        dtype: The result's; x's if not given.
        tile: As :func:`block_shape` gives it.

    Returns:
        [T, N].
    """
    count, rows, columns = len(x), *weight.shape
    digits, units = digits_of(x, norm)
    out = torch.empty(count, rows, dtype=dtype or x.dtype, device=x.device)
    tile = tile or block_shape(count)
    _product_kernel[(triton.cdiv(count, tile.inputs) * triton.cdiv(rows, tile.rows),)](
        TensorDescriptor.from_tensor(digits, [2 * tile.inputs, tile.columns]), units,
        TensorDescriptor.from_tensor(weight, [tile.rows, tile.columns]), weight, scales, out, count, rows, columns,
        BLOCK_T=tile.inputs, BLOCK_N=tile.rows, BLOCK_K=tile.columns, STAGES=tile.stages, AHEAD=_AHEAD, num_warps=tile.warps,
        **dependent_launch.options(x),
    )  # fmt: skip
    return out
