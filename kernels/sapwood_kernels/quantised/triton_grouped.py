"""Triton: products of many rows with a weight of 4 or 8 bits, widened in registers; and the weight widened as a whole.

Each program widens a tile of the weight as it reads it, once, to the activations' dtype, and multiplies by tensor cores with
sums in float32. Programs that follow each other share rows of the weight, which stay in the L2 cache. For very many rows the
widening is repeated too often: there the weight is widened once into a scratch tensor, and the library multiplies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.quantised.grouped import GroupedWeight

_WIDEN_ROWS = 65
"""With this many rows or more the weight is widened once: on an H200 that is faster than widening it tile by tile."""


@triton.jit
def _tile(
    codes, scales, zeros, mins, table, rows, valid, start, K: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, HAS_TABLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Numbers [BLOCK_N, BLOCK_K] of the weight from column ``start`` on, float32, without the rows' factors."""
    if BITS == 4:
        at = start // 2 + tl.arange(0, BLOCK_K // 2)
        tile = valid[:, None] & (at < WIDTH)[None, :]
        taken = tl.load(codes + rows.to(tl.int64)[:, None] * WIDTH + at[None, :], mask=tile, other=0)
        taken = tl.reshape(tl.join(taken & 15, taken >> 4), (BLOCK_N, BLOCK_K))
        values = tl.load(table + taken) if HAS_TABLE else taken.to(tl.float32)
    else:
        at = start + tl.arange(0, BLOCK_K)
        tile = valid[:, None] & (at < WIDTH)[None, :]
        taken = tl.load(codes + rows.to(tl.int64)[:, None] * WIDTH + at[None, :], mask=tile, other=0.0)
        values = taken.to(tl.float32)
    if GROUP >= BLOCK_K:
        at_scale = rows.to(tl.int64) * GROUPS + start // GROUP
        if HAS_ZEROS:
            values -= tl.load(zeros + at_scale, mask=valid, other=0).to(tl.float32)[:, None]
        values *= tl.load(scales + at_scale, mask=valid, other=0.0).to(tl.float32)[:, None]
        if HAS_MINS:
            values -= tl.load(mins + at_scale, mask=valid, other=0.0).to(tl.float32)[:, None]
    else:
        group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        there = valid[:, None] & (group < GROUPS)[None, :]
        at_scale = rows.to(tl.int64)[:, None] * GROUPS + group[None, :]
        apart = tl.reshape(values, (BLOCK_N, BLOCK_K // GROUP, GROUP))
        if HAS_ZEROS:
            apart -= tl.load(zeros + at_scale, mask=there, other=0).to(tl.float32)[:, :, None]
        apart *= tl.load(scales + at_scale, mask=there, other=0.0).to(tl.float32)[:, :, None]
        if HAS_MINS:
            apart -= tl.load(mins + at_scale, mask=there, other=0.0).to(tl.float32)[:, :, None]
        values = tl.reshape(apart, (BLOCK_N, BLOCK_K))
    return tl.where((start + tl.arange(0, BLOCK_K) < K)[None, :], values, 0.0)


@triton.jit
def _product_kernel(
    x, codes, scales, zeros, mins, table, factors, out, M, N, x_stride, K: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr,
    HAS_TABLE: tl.constexpr, HAS_FACTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    programs = tl.cdiv(M, BLOCK_M)
    at_m = tl.program_id(0) % programs * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // programs * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = (at_m < M)[:, None] & (column < K)[None, :]
        taken = tl.load(x + at_m.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        numbers = _tile(
            codes, scales, zeros, mins, table, rows, valid, start, K, WIDTH, GROUPS, GROUP, BITS, HAS_ZEROS, HAS_MINS, HAS_TABLE,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = tl.dot(taken, tl.trans(numbers.to(taken.dtype)), total, input_precision="ieee")
    if HAS_FACTORS:
        total *= tl.load(factors + rows, mask=valid, other=0.0)[None, :]
    inside = (at_m < M)[:, None] & valid[None, :]
    tl.store(out + at_m.to(tl.int64)[:, None] * N + rows[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _widen_kernel(
    codes, scales, zeros, mins, table, factors, out, N, K: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, HAS_TABLE: tl.constexpr,
    HAS_FACTORS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    start = tl.program_id(1) * BLOCK_K
    numbers = _tile(
        codes,
        scales,
        zeros,
        mins,
        table,
        rows,
        valid,
        start,
        K,
        WIDTH,
        GROUPS,
        GROUP,
        BITS,
        HAS_ZEROS,
        HAS_MINS,
        HAS_TABLE,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_FACTORS:
        numbers *= tl.load(factors + rows, mask=valid, other=0.0)[:, None]
    column = start + tl.arange(0, BLOCK_K)
    inside = valid[:, None] & (column < K)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * K + column[None, :], numbers.to(out.dtype.element_ty), mask=inside)


def serves(weight: GroupedWeight) -> bool:
    """Whether groups fit tiles: a power of 2 from 16 on, or one for the whole row."""
    return weight.scales.shape[1] == 1 or (weight.group & (weight.group - 1) == 0 and weight.group >= 16)


def block_shape(count: int, rows: int, processors: int) -> tuple[int, int, int, int, int]:
    """Tile of a product of ``count`` rows with a weight of ``rows``: its rows, columns and depth, warps and stages."""
    tall = 16 if count <= 16 else 32 if count <= 32 else 64 if count <= 64 else 128
    wide = 128 if tall == 128 else 64
    while wide > 16 and -(-rows // wide) * -(-count // tall) < processors:
        wide //= 2
    return tall, wide, 64 if tall == 128 else 128, 8 if tall == 128 and wide == 128 else 4, 3


def widened(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers [N, K] in a dtype, columns as they are held."""
    out = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.codes.device)
    block_n, block_k = 32, 128
    _widen_kernel[(triton.cdiv(weight.rows, block_n), triton.cdiv(weight.columns, block_k))](
        *_tensors(weight), out, weight.rows, *_shape(weight, block_k), HAS_FACTORS=weight.factors is not None,
        BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return out


def product(
    x: Tensor, weight: GroupedWeight, processors: int, blocks: tuple[int, int, int, int, int] | None = None
) -> Tensor:
    """``x @ weight.T``.

    Args:
        x: [T, K].
        weight: One that :func:`serves`.
        processors: The device's: programs that run at once.
        blocks: The tile, as :func:`block_shape` gives it.

    Returns:
        [T, N], in x's dtype.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    count, rows = x.shape[0], weight.rows
    if blocks is None and count >= _WIDEN_ROWS:
        return F.linear(x, widened(weight, x.dtype))
    out = torch.empty(count, rows, dtype=x.dtype, device=x.device)
    block_m, block_n, block_k, warps, stages = blocks or block_shape(count, rows, processors)
    _product_kernel[(triton.cdiv(count, block_m) * triton.cdiv(rows, block_n),)](
        x, *_tensors(weight), out, count, rows, x.stride(0), *_shape(weight, block_k),
        HAS_FACTORS=weight.factors is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _tensors(weight: GroupedWeight) -> tuple[Tensor, ...]:
    """Codes, scales, zeros, mins, table and factors; what there is none of is never read."""
    codes = weight.codes
    others = (weight.zeros, weight.mins, weight.table, weight.factors)
    return codes, weight.scales, *(codes if each is None else each for each in others)


def _shape(weight: GroupedWeight, block_k: int) -> tuple[int, int, int, int, int, bool, bool, bool]:
    """The facts about a weight that are fixed when the kernels are compiled, from K to HAS_TABLE."""
    groups = weight.scales.shape[1]
    group = max(triton.next_power_of_2(weight.columns), block_k) if groups == 1 else weight.group
    return (
        weight.columns, weight.codes.shape[1], groups, group, weight.bits, weight.zeros is not None, weight.mins is not None,
        weight.table is not None,
    )  # fmt: skip
