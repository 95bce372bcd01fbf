"""Triton: what a tile of an expert's matrix holds, where it is kept in few bits: widened in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.experts.stack import DenseStack, StoredStack


@triton.jit
def _wide(scales):
    """Scales as float32; bytes are powers of 2, with a bias of 127."""
    if scales.dtype == tl.uint8:
        scales = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scales.to(tl.float32)


@triton.jit
def widened(
    codes, scales, zeros, mins, table, expert, columns, inside, start, N, K: tl.constexpr, GROUP: tl.constexpr,
    TALL: tl.constexpr, BITS: tl.constexpr, INTEGERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Numbers [BLOCK_N, BLOCK_K] of an expert's matrix from column ``start`` on, without its rows' factors: float32, or codes
    that are the numbers. Beyond column K they are any."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    row = expert.to(tl.int64) * N + columns.to(tl.int64)
    if BITS == 4:
        at = start // 2 + tl.arange(0, BLOCK_K // 2)
        pair = tl.load(
            codes + row[:, None] * (K // 2) + at[None, :], mask=inside[:, None] & (at < K // 2)[None, :], other=0
        )
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (BLOCK_N, BLOCK_K)).to(tl.int32)
        if table is not None:
            values = tl.load(table + code)
        elif INTEGERS:
            values = code.to(tl.float32)
        else:
            # In quarters every number is whole: the exponent's 0 means that there is no leading 1.
            exponent, half = (code >> 1) & 3, code & 1
            quarters = tl.where(exponent == 0, 2 * half, (2 + half) << exponent).to(tl.float32)
            values = tl.where(code > 7, -0.25, 0.25) * quarters
    else:
        at = start + tl.arange(0, BLOCK_K)
        values = tl.load(codes + row[:, None] * K + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0)
        if scales is not None or zeros is not None:
            values = values.to(tl.float32)
    if scales is not None or zeros is not None:
        # A part of a group, or whole ones.
        several: tl.constexpr = GROUP < BLOCK_K
        size: tl.constexpr = GROUP if several else BLOCK_K
        group = start // GROUP + tl.arange(0, BLOCK_K // size)
        there = inside[:, None] & (group < groups)[None, :]
        place = (row // TALL)[:, None] * groups + group[None, :]
        apart = tl.reshape(values, (BLOCK_N, BLOCK_K // size, size))
        if zeros is not None:
            apart -= tl.load(zeros + place, mask=there, other=0).to(tl.float32)[:, :, None]
        if scales is not None:
            apart *= _wide(tl.load(scales + place, mask=there, other=0.0))[:, :, None]
        if mins is not None:
            apart -= tl.load(mins + place, mask=there, other=0.0).to(tl.float32)[:, :, None]
        values = tl.reshape(apart, (BLOCK_N, BLOCK_K))
    return values


def arguments(stack: DenseStack | StoredStack, depth: int) -> tuple[tuple[Tensor | None, ...], dict[str, int | bool]]:
    """A matrix as the kernels take it.

    Args:
        stack: The matrices.
        depth: How many columns a tile has.

    Returns:
        Weight or codes, scales, zeros, mins, table, rows' factors, orders and bias, and what kernels are compiled for: GROUP (0:
        nothing is widened), TALL, BITS and INTEGERS.
    """
    if isinstance(stack, DenseStack):
        return (stack.weight, *[None] * 6, stack.bias), {"GROUP": 0, "TALL": 1, "BITS": 0, "INTEGERS": False}
    scales: Tensor | None = stack.scales
    factors, group = stack.factors, stack.group
    if stack.scales.shape[2] == 1:
        group = max(triton.next_power_of_2(stack.columns), depth)
        if factors is None and stack.mins is None and stack.tall == 1 and stack.scales.dtype != torch.uint8:
            scales, factors = None, stack.scales  # sums are scaled, not each number
    tensors = stack.codes, scales, stack.zeros, stack.mins, stack.table, factors, stack.orders, stack.bias
    return tensors, {"GROUP": group, "TALL": stack.tall, "BITS": stack.bits, "INTEGERS": stack.integers is not None}
