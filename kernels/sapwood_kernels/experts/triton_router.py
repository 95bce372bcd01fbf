"""Triton: a router's logits in float32 of 16-bit rows, which need not be widened first, and the slots of what it chose.

torch's product in float32 runs on no tensor cores, in a few programs for the rows of a decode, after a launch that widens them.
Here few rows are multiplied as they are read, by programs that have two experts each; many on tensor cores, where each number is
taken as a sum of two of TF32's (a 16-bit one is one of them), which rounds about as float32 does.

Bound: one read of the rows and of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 16
"""Rows up to which no tensor cores are used."""
_FEW_EXPERTS, _FEW_DEPTH = 2, 1024
_DECODED = 512
TILES = (16, 16, 128, 4), (64, 64, 32, 3)
"""Rows, experts, numbers at a time and stages, of up to 512 rows and of more."""


@triton.jit(do_not_specialize=["T"])
def _few_kernel(
    x, weight, bias, out, T, EXPERTS: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    experts = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = experts < EXPERTS
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        taken = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        part = tl.load(weight + experts[:, None] * K + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0)
        total += part * taken[None, :]
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + experts, mask=inside, other=0.0)
    tl.store(out + row * EXPERTS + experts, result, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _many_kernel(
    x, weight, bias, out, T, EXPERTS: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    experts = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, inside = rows < T, experts < EXPERTS
    row = x + rows.to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        deep = at < K
        taken = tl.load(row[:, None] + at[None, :], mask=there[:, None] & deep[None, :], other=0.0).to(tl.float32)
        part = tl.load(weight + experts[None, :] * K + at[:, None], mask=inside[None, :] & deep[:, None], other=0.0)
        total = tl.dot(taken, part, total, input_precision="tf32x3")
    if HAS_BIAS:
        total += tl.load(bias + experts, mask=inside, other=0.0)[None, :]
    target = out + rows.to(tl.int64)[:, None] * EXPERTS + experts[None, :]
    tl.store(target, total, mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["COUNT", "first"])
def _turns_kernel(
    table, copies, ids, out, COUNT, first, CHOSEN: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COUNT
    expert = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    turn = (first + at // CHOSEN) % tl.load(copies + expert, mask=inside, other=1)
    tl.store(out + at, tl.load(table + expert * RANKS + turn, mask=inside, other=0).to(tl.int32), mask=inside)


def logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x.float() @ weight.T + bias``: [T, K], float32 [E, K] and [E] -> float32 [T, E]."""
    (rows, width), experts = x.shape, len(weight)
    out = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    sizes = {"EXPERTS": experts, "K": width, "HAS_BIAS": bias is not None}
    tensors = x.contiguous(), weight, weight if bias is None else bias, out, rows
    if rows <= FEW:
        blocks = {"BLOCK_N": _FEW_EXPERTS, "BLOCK_K": min(_FEW_DEPTH, triton.next_power_of_2(width))}
        _few_kernel[(rows, triton.cdiv(experts, _FEW_EXPERTS))](*tensors, **sizes, **blocks, num_warps=4)
        return out
    height, wide, depth, stages = TILES[rows > _DECODED]
    grid = triton.cdiv(rows, height), triton.cdiv(experts, wide)
    blocks = {"BLOCK_M": height, "BLOCK_N": wide, "BLOCK_K": depth}
    _many_kernel[grid](*tensors, **sizes, **blocks, num_warps=4, num_stages=stages)
    return out


def turns(table: Tensor, copies: Tensor, ids: Tensor, first: int) -> Tensor:
    """``ops.turns``, in one launch: int32, of contiguous ids."""
    out = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    _turns_kernel[(triton.cdiv(ids.numel(), 256),)](
        table, copies, ids, out, ids.numel(), first, CHOSEN=ids.shape[1], RANKS=table.shape[1], BLOCK=256, num_warps=2
    )
    return out
