"""Triton: adds the results of attention over some keys to those over others, weighted by their sums of weights."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 4096
"""Of a program."""


@triton.jit(do_not_specialize=["first"])
def _add_kernel(
    out,
    sums,
    part,
    part_sums,
    rows,
    first,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    heads, columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    there = heads < HEADS
    at = first + tl.program_id(0)
    own = tl.load(rows + at).to(tl.int64) * HEADS + heads
    other = at.to(tl.int64) * HEADS + heads
    mine = tl.load(sums + own, mask=there, other=0.0)
    more = tl.load(part_sums + other, mask=there, other=0.0)
    highest = tl.maximum(mine, more)
    weight, part_weight = tl.exp2(mine - highest), tl.exp2(more - highest)
    total = weight + part_weight
    inside = there[:, None] & (columns < D)[None, :]
    places = own[:, None] * D + columns[None, :]
    found = tl.load(out + places, mask=inside, other=0.0).to(tl.float32) * (weight / total)[:, None]
    added = tl.load(part + other[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    found += added * (part_weight / total)[:, None]
    tl.store(out + places, found.to(out.dtype.element_ty), mask=inside)
    tl.store(sums + own, highest + tl.log2(total), mask=there)


def add_parts(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor, rows: Tensor, first: int, count: int) -> None:
    """Adds parts of the results of some tokens; does not wait for the device. Mutates ``out`` and ``sums``.

    Args:
        out: [T, H, D], contiguous.
        sums: float32 [T, H]: the logarithms, to base 2, of the sums of weights of ``out``.
        part: [N, H, D], contiguous: results over other keys.
        part_sums: float32 [N, H]: the same of ``part``.
        rows: int32 [N]: whose they are.
        first, count: The parts that are added, all of different tokens.
    """
    heads, dim = out.shape[1:]
    block_d = triton.next_power_of_2(dim)
    block = min(triton.next_power_of_2(heads), max(1, _NUMBERS // block_d))
    _add_kernel[(count, triton.cdiv(heads, block))](
        out, sums, part, part_sums, rows, first, HEADS=heads, D=dim, BLOCK_D=block_d, BLOCK=block, num_warps=4
    )
