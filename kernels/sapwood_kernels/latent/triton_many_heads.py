"""Triton: queries and values of latent attention (MLA) as ``triton_heads`` has them, of more tokens, on tensor cores.

A program multiplies a tile of tokens with a part of a head's matrix. Queries leave with their rotary parts next to them, and
values head by head of a token, so that nothing is put together or copied afterwards, as torch does. Bound: one read and one write
of queries and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch

MOST = 512
"""Tokens up to which they are used."""
_TOKENS, _RESULTS, _DEPTH = 64, 64, 64
"""Of a program: tokens, numbers of each one's result, and numbers that are multiplied at a time."""


@triton.jit(do_not_specialize=["T"])
def _absorb_kernel(
    query, up, out, T, token_stride, head_stride, HEADS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, token = tl.program_id(1), tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    latent, rotary = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    known, inside = token < T, latent < R
    source = query + token * token_stride + head * head_stride
    target = out + (token * HEADS + head) * (R + E)
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for start in range(0, N, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        taken = tl.load(source[:, None] + at[None, :], mask=known[:, None] & (at < N)[None, :], other=0.0)
        part = tl.load(
            up + (head * (N + V) + at[:, None]) * R + latent[None, :], mask=(at < N)[:, None] & inside[None, :], other=0.0
        )  # fmt: skip
        total = tl.dot(taken, part, total, input_precision="ieee")
    tl.store(target[:, None] + latent[None, :], total.to(out.dtype.element_ty), mask=known[:, None] & inside[None, :])
    turned = known[:, None] & (rotary < tl.where(tl.program_id(0) == 0, E, 0))[None, :]
    tl.store(
        target[:, None] + R + rotary[None, :], tl.load(source[:, None] + N + rotary[None, :], mask=turned, other=0.0), mask=turned
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _values_kernel(
    summed, up, out, T, HEADS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, token = tl.program_id(1), tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    known, inside, row = token < T, value < V, token * HEADS + head
    total = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, R, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        taken = tl.load(summed + row[:, None] * R + at[None, :], mask=known[:, None] & (at < R)[None, :], other=0.0)
        part = tl.load(
            up + (head * (N + V) + N + value[:, None]) * R + at[None, :], mask=inside[:, None] & (at < R)[None, :], other=0.0
        )  # fmt: skip
        total = tl.dot(taken, tl.trans(part), total, input_precision="ieee")
    target = out + row[:, None] * V + value[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=known[:, None] & inside[None, :])


def absorb(query: Tensor, up: Tensor, nope: int) -> Tensor:
    """Computes ``LatentHeads.absorb`` of queries [T, H, N + E], whose last dimension is contiguous: [T, H, R + E]."""
    (tokens, heads, width), (_, both, rank) = query.shape, up.shape
    assert query.stride(2) == 1 and up.is_contiguous()
    out = torch.empty(tokens, heads, rank + width - nope, dtype=query.dtype, device=query.device)
    _absorb_kernel[(triton.cdiv(rank, _RESULTS), heads, triton.cdiv(tokens, _TOKENS))](
        query, up, out, tokens, *query.stride()[:2], HEADS=heads, N=nope, V=both - nope, R=rank, E=width - nope,
        BLOCK_T=_TOKENS, BLOCK_R=_RESULTS, BLOCK_K=_DEPTH, BLOCK_E=triton.next_power_of_2(width - nope), num_warps=4,
        num_stages=3, **dependent_launch.options(query, MOST),
    )  # fmt: skip
    return out


def values(latent: Tensor, up: Tensor, nope: int) -> Tensor:
    """Computes ``LatentHeads.values`` of [T, H, R]: [T, H, V], contiguous."""
    (tokens, heads, rank), value = latent.shape, up.shape[1] - nope
    assert up.is_contiguous()
    out = torch.empty(tokens, heads, value, dtype=latent.dtype, device=latent.device)
    _values_kernel[(triton.cdiv(value, _RESULTS), heads, triton.cdiv(tokens, _TOKENS))](
        latent.contiguous(), up, out, tokens, HEADS=heads, N=nope, V=value, R=rank, BLOCK_T=_TOKENS, BLOCK_V=_RESULTS,
        BLOCK_K=_DEPTH, num_warps=4, num_stages=3, **dependent_launch.options(latent, MOST),
    )  # fmt: skip
    return out
