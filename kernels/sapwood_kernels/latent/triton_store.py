"""Triton: of latent attention (MLA) the norm of the vectors, all rotations and the write to the cache, in one launch.

The first program of a token takes its vector, the others a few query heads each. Separately these are some twenty launches.
Bound: reads and writes queries and vectors once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.triton_qkv import as_stored

_HEADS = 8
"""Heads of a program."""


@triton.jit
def rotate(source, target, cos, sin, inside, factor, E: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr,
            HALF: tl.constexpr):  # fmt: skip
    """Rotates [rows, E] from the pointers ``source`` [rows, 1] to ``target``, where pairs stand half of E apart."""
    half: tl.constexpr = E // 2
    pair = tl.arange(0, HALF)[None, :]
    there = inside & (pair < half)
    if INTERLEAVED:
        one, two = 2 * pair, 2 * pair + 1
    else:
        one, two = pair, pair + half
    low = tl.load(source + one, mask=there, other=0.0).to(tl.float32)
    high = tl.load(source + two, mask=there, other=0.0).to(tl.float32)
    kind = source.dtype.element_ty
    cosine = tl.load(cos + pair, mask=pair < half, other=0.0).to(tl.float32)
    sine = tl.load(sin + pair + half, mask=pair < half, other=0.0).to(tl.float32)
    stored = target.dtype.element_ty
    tl.store(target + pair, as_stored((low * cosine - high * sine).to(kind), factor, SCALED).to(stored), mask=there)
    tl.store(
        target + pair + half, as_stored((high * cosine + low * sine).to(kind), factor, SCALED).to(stored), mask=there
    )


@triton.jit
def store_tile(
    vectors, pages, slots, cos, sin, weight, eps, factor, tokens, there, vector_stride, page_stride, slot_stride, R: tl.constexpr,
    E: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Norms and rotates the vectors of int64 ``tokens`` [n, 1], and writes those that are ``there`` to the cache."""
    columns = tl.arange(0, WHOLE)[None, :]
    within = columns < R
    slot = tl.load(slots + tokens)
    page = pages + slot // PAGE * page_stride + slot % PAGE * slot_stride
    vector = vectors + tokens * vector_stride
    latent = tl.load(vector + columns, mask=within, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=1) / R + eps)
    normed = (latent * scale[:, None] * tl.load(weight + columns, mask=within, other=0.0)).to(vectors.dtype.element_ty)
    tl.store(page + columns, as_stored(normed, factor, SCALED).to(pages.dtype.element_ty), mask=there & within)
    rotate(vector + R, page + R, cos + tokens * E, sin + tokens * E, there, factor, E, INTERLEAVED, SCALED, HALF)


@triton.jit
def _store_kernel(
    vectors, query, turned, pages, slots, cos, sin, weight, eps, factor, vector_stride, query_stride, page_stride, slot_stride,
    HEADS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        own = tl.full((1, 1), token, tl.int64)
        store_tile(
            vectors, pages, slots, cos, sin, weight, eps, factor, own, own >= 0, vector_stride, page_stride, slot_stride, R, E,
            PAGE, INTERLEAVED, SCALED, BLOCK_R, HALF,
        )  # fmt: skip
    else:
        heads = ((tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        source = query + token * query_stride + heads * (N + E)
        target = turned + (token * HEADS + heads) * (N + E)
        columns = tl.arange(0, BLOCK_N)[None, :]
        plain = (heads < HEADS) & (columns < N)
        tl.store(target + columns, tl.load(source + columns, mask=plain, other=0.0), mask=plain)
        rotate(
            source + N, target + N, cos + token * E, sin + token * E, heads < HEADS, 1.0, E, INTERLEAVED, False, HALF
        )


def store_latent(
    vectors: Tensor,
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    to: KVDestination,
    *,
    weight: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Norms and rotates vectors and writes them to the cache; returns the queries, rotated.

    Args:
        vectors: [T, R + E], rows contiguous.
        query: [T, H, N + E], rows contiguous.
        cos: [T, 1, E], contiguous, as ``reference.rope`` takes it.
        sin: Likewise.
        to: Where vectors go: its ``keys``, [P, S, 1, R + E], of the vectors' dtype or float8_e4m3fn, are mutated.
        weight: float32 [R]: the norm's.
        eps: Added to the mean square in the norm.
        interleaved: Whether pairs stand side by side in vectors and queries; afterwards they are half of E apart.

    Returns:
        [T, H, N + E].
    """
    tokens, heads, dim = query.shape
    rank, ends, pages = len(weight), cos.shape[-1], to.keys
    assert vectors.stride(1) == query.stride(2) == pages.stride(3) == 1 and query.stride(1) == dim
    turned = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    _store_kernel[(tokens, 1 + triton.cdiv(heads, _HEADS))](
        vectors, query, turned, pages, to.slots, cos, sin, weight, eps, 1.0 / to.scales[0], vectors.stride(0), query.stride(0),
        *pages.stride()[:2],
        HEADS=heads, R=rank, N=dim - ends, E=ends, PAGE=pages.shape[1], INTERLEAVED=interleaved,
        SCALED=pages.dtype == torch.float8_e4m3fn, BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_N=triton.next_power_of_2(dim - ends), HALF=triton.next_power_of_2(ends // 2), BLOCK=_HEADS, num_warps=2,
        **dependent_launch.options(vectors),
    )  # fmt: skip
    return turned
