"""Triton: a linear layer on one row with a weight of 4 or 8 bits, in one kernel with the norm before and the gate or sum after.

As ``triton_gemv``, which says why: each program takes ``BLOCK_N`` rows of the weight and streams their codes past the input. In
a group products are summed as codes; the group's zero, scale and min are applied to the sum, so that a code costs a
conversion and a product: ``sum (code - zero) scale x = scale (sum code x - zero sum x)``.

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


@triton.jit
def _part(
    codes, scales, zeros, mins, table, rows, valid, low, high, inputs, start,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, HAS_TABLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Products of a tile of codes with its inputs, summed by group and scaled: [BLOCK_N, groups of the tile]."""
    at = start + tl.arange(0, BLOCK_W)
    tile = valid[:, None] & (at < WIDTH)[None, :]
    taken = tl.load(codes + rows.to(tl.int64)[:, None] * WIDTH + at[None, :], mask=tile, other=0.0)
    if BITS == 4:
        first, second = taken & 15, taken >> 4
        if HAS_TABLE:
            products = tl.load(table + first) * low[None, :] + tl.load(table + second) * high[None, :]
        else:
            products = first.to(tl.float32) * low[None, :] + second.to(tl.float32) * high[None, :]
    else:
        products = taken.to(tl.float32) * low[None, :]
    sums = tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_W // PER, PER)), axis=2)
    group = start // PER + tl.arange(0, BLOCK_W // PER)
    if GROUPS == 1:
        group = group * 0
    there = valid[:, None] & (group < GROUPS)[None, :]
    at_scale = rows.to(tl.int64)[:, None] * GROUPS + group[None, :]
    if HAS_ZEROS:
        sums -= tl.load(zeros + at_scale, mask=there, other=0).to(tl.float32) * inputs[None, :]
    sums *= tl.load(scales + at_scale, mask=there, other=0.0).to(tl.float32)
    if HAS_MINS:
        sums -= tl.load(mins + at_scale, mask=there, other=0.0).to(tl.float32) * inputs[None, :]
    return tl.sum(sums, axis=1)


@triton.jit
def _row_kernel(
    x, order, codes, scales, zeros, mins, table, factors, norm, bias, residual, out, eps, N: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_FACTORS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    total = tl.zeros((BLOCK_N,), tl.float32)
    total_up = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_W,), tl.float32)
    for start in range(0, WIDTH, BLOCK_W):
        at = start + tl.arange(0, BLOCK_W)
        column = at * 2 if BITS == 4 else at
        there = column < K
        if HAS_ORDER:
            column = tl.load(order + column, mask=there, other=0)
        low = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += low * low
            low *= tl.load(norm + column, mask=there, other=0.0)
        high = tl.zeros((BLOCK_W,), tl.float32)
        if BITS == 4:
            column = at * 2 + 1
            there = column < K
            if HAS_ORDER:
                column = tl.load(order + column, mask=there, other=0)
            high = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += high * high
                high *= tl.load(norm + column, mask=there, other=0.0)
        inputs = tl.sum(tl.reshape(low + high, (BLOCK_W // PER, PER)), axis=1)
        total += _part(
            codes, scales, zeros, mins, table, rows, valid, low, high, inputs, start, WIDTH, GROUPS, BITS,
            HAS_ZEROS, HAS_MINS, HAS_TABLE, BLOCK_N, BLOCK_W, PER,
        )  # fmt: skip
        if GATE != 0:
            total_up += _part(
                codes, scales, zeros, mins, table, rows + N, valid, low, high, inputs, start, WIDTH, GROUPS, BITS,
                HAS_ZEROS, HAS_MINS, HAS_TABLE, BLOCK_N, BLOCK_W, PER,
            )  # fmt: skip
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    result = total * scale
    if HAS_FACTORS:
        result *= tl.load(factors + rows, mask=valid, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    if GATE != 0:
        up = total_up * scale
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


def block_shape(rows: int, width: int) -> tuple[int, int, int]:
    """Rows and bytes of a program's tile, and its warps."""
    return 4 if rows >= 4096 else 2, min(triton.next_power_of_2(width), 2048), 4


def serves(weight: GroupedWeight) -> bool:
    """Whether groups are a power of 2, which the kernel cuts its tiles by, or one for the whole row."""
    return weight.scales.shape[1] == 1 or (weight.group & (weight.group - 1) == 0 and weight.group >= 8)


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
    """``gate(norm(x) @ weight.T + bias) + add_to`` for a single row; arguments as for ``triton_gemv.gemv``, ``weight`` one that
    :func:`serves`."""
    codes, groups = weight.codes, weight.scales.shape[1]
    width = codes.shape[1]
    rows = weight.rows // (1 if gate is None else 2)
    out = torch.empty((1, rows), dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    block_n, block_w, warps = blocks or block_shape(rows, width)
    per = block_w if groups == 1 else weight.group * weight.bits // 8
    block_w = max(block_w, per)
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    _row_kernel[(triton.cdiv(rows, block_n),)](
        x, x if weight.order is None else weight.order, codes, weight.scales,
        x if weight.zeros is None else weight.zeros, x if weight.mins is None else weight.mins,
        x if weight.table is None else weight.table,
        x if weight.factors is None else weight.factors, norm_weight, x if bias is None else bias,
        x if add_to is None else add_to, out, eps, rows, weight.columns, width, groups, weight.bits,
        HAS_ORDER=weight.order is not None, HAS_ZEROS=weight.zeros is not None, HAS_MINS=weight.mins is not None,
        HAS_TABLE=weight.table is not None,
        HAS_FACTORS=weight.factors is not None, HAS_NORM=norm is not None, HAS_BIAS=bias is not None,
        ADDS=add_to is not None, GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate], BLOCK_N=block_n, BLOCK_W=block_w,
        PER=per, num_warps=warps,
    )  # fmt: skip
    return out
