"""Triton: products of many rows in 16 bits with a weight of 4 bits in groups, the weight as the left factor.

Tensor cores of Hopper take their left factor from registers: a code that is read there becomes a number there, and is not
written to shared memory. The two codes of a byte are multiplied apart: a row of x has its even columns first, then its odd ones.
A code becomes a number without a conversion: in the low bits of a fraction it is ``128 + code`` (float16: ``1024 + code``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.quantised.grouped import GroupedWeight

_BASES = {torch.bfloat16: 128, torch.float16: 1024}


@triton.jit
def _numbers(codes, zero, scale, BASE: tl.constexpr):
    bits = codes.to(tl.int16) | (0x4300 if BASE == 128 else 0x6400)
    return (bits.to(scale.dtype, bitcast=True) - zero[:, None]) * scale[:, None]


@triton.jit
def _turned_kernel(
    x, codes, scales, zeros, out, M, N, K: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_BYTES: tl.constexpr, HAS_ZEROS: tl.constexpr, SPLIT: tl.constexpr, BASE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    programs = tl.cdiv(M, BLOCK_M)
    at_m = tl.program_id(0) % programs * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // programs * BLOCK_N + tl.arange(0, BLOCK_N)
    read_m, read = (at_m % M).to(tl.int64), (rows % N).to(tl.int64)  # rows beyond the last are read, not written
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(1) * (WIDTH // SPLIT)
    for start in range(first, first + WIDTH // SPLIT, BLOCK_W):
        at = start + tl.arange(0, BLOCK_W)
        taken = tl.load(codes + read[:, None] * WIDTH + at[None, :])
        group = start // GROUP_BYTES
        scale = tl.load(scales + read * GROUPS + group)
        zero = tl.full((BLOCK_N,), BASE, tl.float32).to(scale.dtype)
        if HAS_ZEROS:
            zero = (tl.load(zeros + read * GROUPS + group).to(tl.float32) + BASE).to(scale.dtype)
        even = tl.load(x + read_m[None, :] * K + at[:, None])
        total = tl.dot(_numbers(taken & 15, zero, scale, BASE), even, total)
        odd = tl.load(x + read_m[None, :] * K + WIDTH + at[:, None])
        total = tl.dot(_numbers(taken >> 4, zero, scale, BASE), odd, total)
    inside = (rows < N)[:, None] & (at_m < M)[None, :]
    to = out + (tl.program_id(1) * M.to(tl.int64) + at_m.to(tl.int64)[None, :]) * N + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


def serves(weight: GroupedWeight) -> bool:
    """Whether it is such a weight: scales in 16 bits, which x has to have, too; groups of whole tiles, columns in order."""
    plain = weight.bits == 4 and weight.table is None and weight.order is None and weight.factors is None
    tiles = weight.columns % 128 == 0 and (weight.scales.shape[1] == 1 or weight.group % 128 == 0)
    return plain and tiles and weight.scales.dtype in _BASES


def block_shape(count: int, rows: int, processors: int) -> tuple[int, int, int, int, int, int]:
    """Tile of a product of ``count`` rows of x: rows of x and of the weight, bytes, warps, stages, parts of the inputs."""
    tall = 16 if count <= 16 else 32 if count <= 32 else 64 if count <= 64 else 128 if count <= 128 else 256
    programs = -(-rows // 64) * -(-count // tall)
    return tall, 64, 64, 8 if tall == 256 else 4, 3 if tall >= 128 else 4, 2 if 2 * programs <= 2 * processors else 1


def product(
    x: Tensor, weight: GroupedWeight, processors: int, blocks: tuple[int, int, int, int, int, int] | None = None
) -> Tensor:
    """``x @ weight.T``.

    Args:
        x: [T, K], of the scales' dtype.
        weight: One that :func:`serves`.
        processors: The device's: programs that run at once.
        blocks: The tile, as :func:`block_shape` gives it.

    Returns:
        [T, N], of x's dtype.
    """
    (count, columns), rows, groups = x.shape, weight.rows, weight.scales.shape[1]
    width = columns // 2
    apart = x.view(count, width, 2).transpose(1, 2).contiguous()
    block_m, block_n, block_w, warps, stages, split = blocks or block_shape(count, rows, processors)
    if width % (split * block_w):
        split = 1
    whole = split == 1
    out = torch.empty(split, count, rows, dtype=x.dtype if whole else torch.float32, device=x.device)
    _turned_kernel[(triton.cdiv(count, block_m) * triton.cdiv(rows, block_n), split)](
        apart, weight.codes, weight.scales, weight.codes if weight.zeros is None else weight.zeros, out, count, rows,
        columns, width, groups, width if groups == 1 else weight.group // 2, HAS_ZEROS=weight.zeros is not None,
        SPLIT=split, BASE=_BASES[x.dtype], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_W=block_w, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out[0] if whole else out.sum(0).to(x.dtype)
