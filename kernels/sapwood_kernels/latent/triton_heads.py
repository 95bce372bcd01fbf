"""Triton: queries of latent attention (MLA) of few tokens as they meet cached vectors, and what comes out of it as values.

A program has a part of a head's matrix, which it begins to read before the kernel ahead has ended, for all tokens. torch takes
two launches for the queries, and waits before and after each. Bound: one read of the matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch

MOST = 8
"""Tokens up to which they are used: half a layer of DeepSeek-V2-Lite took an H200 47 us for 8 and 65 for 16, as long as for 64 on
tensor cores."""
_LATENT, _VALUES = 64, 16  # numbers of a program's results


@triton.jit(do_not_specialize=["T"])
def _absorb_kernel(
    query, up, out, T, token_stride, head_stride, HEADS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    flat, latent = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = (flat < N)[:, None] & (latent < R)[None, :]
    part = tl.load(up + (head * (N + V) + flat[:, None]) * R + latent[None, :], mask=inside, other=0.0).to(tl.float32)
    rotary = tl.arange(0, BLOCK_E)
    turned = rotary < tl.where(tl.program_id(1) == 0, E, 0)
    if PDL:
        gdc_wait()
    for token in range(T):
        source = query + token * token_stride + head * head_stride
        target = out + (token * HEADS + head) * (R + E)
        taken = tl.load(source + flat, mask=flat < N, other=0.0).to(tl.float32)
        tl.store(target + latent, tl.sum(part * taken[:, None], axis=0).to(out.dtype.element_ty), mask=latent < R)
        tl.store(target + R + rotary, tl.load(source + N + rotary, mask=turned, other=0.0), mask=turned)


@triton.jit(do_not_specialize=["T"])
def _values_kernel(
    summed, up, out, T, HEADS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    value, latent = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    inside = (value < V)[:, None] & (latent < R)[None, :]
    at = (head * (N + V) + N + value[:, None]) * R + latent[None, :]
    part = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for token in range(T):
        row = token * HEADS + head
        taken = tl.load(summed + row * R + latent, mask=latent < R, other=0.0).to(tl.float32)
        result = tl.sum(part * taken[None, :], axis=1)
        tl.store(out + row * V + value, result.to(out.dtype.element_ty), mask=value < V)


def absorb(query: Tensor, up: Tensor, nope: int) -> Tensor:
    """Computes ``LatentHeads.absorb`` of queries [T, H, N + E], whose last dimension is contiguous: [T, H, R + E]."""
    (tokens, heads, width), (_, both, rank) = query.shape, up.shape
    assert query.stride(2) == 1 and up.is_contiguous()
    out = torch.empty(tokens, heads, rank + width - nope, dtype=query.dtype, device=query.device)
    _absorb_kernel[(heads, triton.cdiv(rank, _LATENT))](
        query, up, out, tokens, *query.stride()[:2], HEADS=heads, N=nope, V=both - nope, R=rank, E=width - nope,
        BLOCK_N=triton.next_power_of_2(nope), BLOCK_R=_LATENT, BLOCK_E=triton.next_power_of_2(width - nope), num_warps=4,
        **dependent_launch.options(query),
    )  # fmt: skip
    return out


def values(latent: Tensor, up: Tensor, nope: int) -> Tensor:
    """Computes ``LatentHeads.values`` of [T, H, R]: [T, H, V], contiguous."""
    (tokens, heads, rank), value = latent.shape, up.shape[1] - nope
    assert up.is_contiguous()
    out = torch.empty(tokens, heads, value, dtype=latent.dtype, device=latent.device)
    _values_kernel[(heads, triton.cdiv(value, _VALUES))](
        latent.contiguous(), up, out, tokens, HEADS=heads, N=nope, V=value, R=rank, BLOCK_V=_VALUES,
        BLOCK_R=triton.next_power_of_2(rank), num_warps=4, **dependent_launch.options(latent),
    )  # fmt: skip
    return out
