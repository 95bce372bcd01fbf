"""Triton: a linear layer on one row with a weight of 4 bits without a table, eight codes at a time.

As ``triton_row``, but that codes are read as words of eight, and become numbers without a conversion: a code in the upper bits
of a float32's fraction is ``1 + code / 16``, so that ``sum code x = 16 (sum (1 + code / 16) x - sum x)``. What a thread reads of
a group is summed before its scale is applied; threads are summed once, at the end.

Bound: one read of codes, zeros and scales. O(N K).
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.quantised.grouped import GroupedWeight

Gate = Literal["silu", "gelu_tanh"]
_ONE = tl.constexpr(0x3F800000)
_CODES = 8
"""Of a word."""


@triton.jit
def _part(
    words, scales, zeros, rows, valid, x, inputs, at, group,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Scaled sums of a tile of words [BLOCK_N, groups, words of a group] times x."""
    row = rows.to(tl.int64)[:, None, None]
    tile = valid[:, None, None] & (at < WIDTH)[None]
    taken = tl.load(words + row * WIDTH + at[None], mask=tile, other=0)
    shifts = tl.arange(0, 8) * 4
    bits = (((taken[:, :, :, None] >> shifts[None, None, None, :]) & 15) << 19) | _ONE
    sums = tl.sum(bits.to(tl.float32, bitcast=True) * x[None], axis=3) * 16.0
    there = valid[:, None] & (group < GROUPS)[None, :]
    at_scale = rows.to(tl.int64)[:, None] * GROUPS + group[None, :]
    zero = tl.full(at_scale.shape, 16.0, tl.float32)
    if HAS_ZEROS:
        zero += tl.load(zeros + at_scale, mask=there, other=0).to(tl.float32)
    scale = tl.load(scales + at_scale, mask=there, other=0.0).to(tl.float32)
    return (sums - zero[:, :, None] * inputs[None]) * scale[:, :, None]


@triton.jit
def _words_kernel(
    x, words, scales, zeros, factors, norm, bias, residual, out, eps, N: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    total = tl.zeros((BLOCK_N, BLOCK_G, PER), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_G, PER), tl.float32)
    squares = tl.zeros((BLOCK_G, PER, 8), tl.float32)
    for start in range(0, WIDTH, BLOCK_G * PER):
        part = tl.arange(0, BLOCK_G)
        at = start + part[:, None] * PER + tl.arange(0, PER)[None, :]
        column = at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        there = column < K
        values = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += values * values
            values *= tl.load(norm + column, mask=there, other=0.0)
        inputs = tl.sum(values, axis=2)
        group = start // PER + part
        if GROUPS == 1:
            group = group * 0
        total += _part(words, scales, zeros, rows, valid, values, inputs, at, group, WIDTH, GROUPS, HAS_ZEROS)
        if GATE != 0:
            total_up += _part(
                words, scales, zeros, rows + N, valid, values, inputs, at, group, WIDTH, GROUPS, HAS_ZEROS
            )
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(tl.reshape(squares, (BLOCK_G * PER * 8,)), axis=0) / K + eps)
    result = tl.sum(tl.reshape(total, (BLOCK_N, BLOCK_G * PER)), axis=1) * scale
    if HAS_FACTORS:
        result *= tl.load(factors + rows, mask=valid, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    if GATE != 0:
        up = tl.sum(tl.reshape(total_up, (BLOCK_N, BLOCK_G * PER)), axis=1) * scale
        if HAS_FACTORS:
            up *= tl.load(factors + N + rows, mask=valid, other=0.0)
        if HAS_BIAS:
            up += tl.load(bias + N + rows, mask=valid, other=0.0).to(tl.float32)
        if GATE == 1:
            result = result * tl.sigmoid(result) * up
        else:
            inner = 0.7978845608028654 * (result + 0.044715 * result * result * result)
            result = result * tl.sigmoid(2.0 * inner) * up  # 0.5 (1 + tanh z) = sigmoid(2 z)
    if ADDS:
        result += tl.load(residual + rows, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=valid)


def block_shape(rows: int, words: int) -> tuple[int, int, int]:
    """Rows and words of a program's tile, and its warps."""
    return 4, min(triton.next_power_of_2(words), 512), 4


def serves(weight: GroupedWeight) -> bool:
    """Whether a weight is of such codes, in whole words, inputs in order, groups of a power of 2 that are whole words."""
    whole = weight.columns % _CODES == 0 and weight.codes.is_contiguous() and weight.codes.data_ptr() % 4 == 0
    plain = weight.bits == 4 and weight.table is None and weight.order is None
    group = weight.group
    return whole and plain and (weight.scales.shape[1] == 1 or (group & (group - 1) == 0 and group >= _CODES))


def row_product(
    x: Tensor,
    weight: GroupedWeight,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    blocks: tuple[int, int, int] | None = None,
) -> Tensor:
    """What ``triton_row.row_product`` computes, with a weight that this module :func:`serves`."""
    words = weight.codes.view(torch.int32)
    width, groups = words.shape[1], weight.scales.shape[1]
    rows = weight.rows // (1 if gate is None else 2)
    out = torch.empty((1, rows), dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    block_n, block_w, warps = blocks or block_shape(rows, width)
    per = 16 if groups == 1 else weight.group // _CODES
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    _words_kernel[(triton.cdiv(rows, block_n),)](
        x, words, weight.scales, words if weight.zeros is None else weight.zeros,
        x if weight.factors is None else weight.factors, norm_weight, x if bias is None else bias,
        x if add_to is None else add_to, out, eps, rows, weight.columns, width, groups,
        HAS_ZEROS=weight.zeros is not None, HAS_FACTORS=weight.factors is not None, HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None, ADDS=add_to is not None, GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate],
        BLOCK_N=block_n, BLOCK_G=max(block_w // per, 1), PER=per, num_warps=warps,
    )  # fmt: skip
    return out
