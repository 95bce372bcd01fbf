"""Triton: the angles of some positions, looked up and spread over a head's numbers: one launch, where torch's kernels are four.

Bound: reads a position's row of the table and writes its cosines and sines once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.rotary_pairs import RotaryPairs


@triton.jit
def _angles_kernel(
    table, positions, cos, sin, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = table + tl.load(positions + token) * ROTATED
    at = tl.arange(0, BLOCK)
    half: tl.constexpr = ROTATED // 2
    pair = at // 2 if INTERLEAVED else at % half
    first = at % 2 == 0 if INTERLEAVED else at < half
    turned = at < ROTATED
    cosine = tl.load(row + pair, mask=turned, other=1.0)
    sine = tl.load(row + half + pair, mask=turned, other=0.0)
    tl.store(cos + token * DIM + at, cosine, mask=at < DIM)
    tl.store(sin + token * DIM + at, tl.where(first, -sine, sine), mask=at < DIM)


def spread_angles(table: Tensor, positions: Tensor, pairs: RotaryPairs) -> tuple[Tensor, Tensor]:
    """``pairs.spread`` of the cosines and sines of some positions: two new tensors [T, 1, D].

    Args:
        table: [P, R], contiguous: the cosine of each pair at each position, then the sines.
        positions: int64 [T], below P.
        pairs: Which numbers are rotated together.
    """
    shape = len(positions), 1, pairs.head_dim
    cos, sin = (torch.empty(shape, dtype=table.dtype, device=table.device) for _ in range(2))
    block = triton.next_power_of_2(pairs.head_dim)
    _angles_kernel[(len(positions),)](
        table, positions, cos, sin,
        DIM=pairs.head_dim, ROTATED=pairs.rotated, INTERLEAVED=pairs.interleaved, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return cos, sin
