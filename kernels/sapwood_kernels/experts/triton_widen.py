"""Triton: what a tile of an expert's matrix holds, where it is kept in few bits: widened in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power(exponent):
    """2 to a power that is held with a bias of 127, float32."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def widened(
    codes, scales, zeros, expert, columns, inside, start, N, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    INTEGERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Numbers [BLOCK_N, BLOCK_K] of an expert's matrix from column ``start`` on, float32."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    row = expert.to(tl.int64) * N + columns.to(tl.int64)
    if BITS == 4:
        at = start // 2 + tl.arange(0, BLOCK_K // 2)
        pair = tl.load(
            codes + row[:, None] * (K // 2) + at[None, :], mask=inside[:, None] & (at < K // 2)[None, :], other=0
        )
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (BLOCK_N, BLOCK_K)).to(tl.int32)
        if INTEGERS:
            values = code.to(tl.float32)
        else:
            # In quarters every number is whole: the exponent's 0 means that there is no leading 1.
            exponent, half = (code >> 1) & 3, code & 1
            quarters = tl.where(exponent == 0, 2 * half, (2 + half) << exponent).to(tl.float32)
            values = tl.where(code > 7, -0.25, 0.25) * quarters
    else:
        at = start + tl.arange(0, BLOCK_K)
        values = tl.load(
            codes + row[:, None] * K + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0
        ).to(tl.float32)
    if GROUP >= BLOCK_K:
        place = row * groups + start // GROUP
        held = tl.load(scales + place, mask=inside, other=0)
        if INTEGERS:
            values -= tl.load(zeros + place, mask=inside, other=0).to(tl.float32)[:, None]
        values *= (_power(held) if BITS == 4 and not INTEGERS else held.to(tl.float32))[:, None]
    else:
        group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        there = inside[:, None] & (group < groups)[None, :]
        place = row[:, None] * groups + group[None, :]
        held = tl.load(scales + place, mask=there, other=0)
        apart = tl.reshape(values, (BLOCK_N, BLOCK_K // GROUP, GROUP))
        if INTEGERS:
            apart -= tl.load(zeros + place, mask=there, other=0).to(tl.float32)[:, :, None]
        held = _power(held) if BITS == 4 and not INTEGERS else held.to(tl.float32)
        values = tl.reshape(apart * held[:, :, None], (BLOCK_N, BLOCK_K))
    return values
