"""Triton: of latent attention (MLA) all between the projections and attention of absorbed queries, in one launch.

Vectors are normed, rotated and written to the cache; queries meet the matrix that expands latents, and their rotated
parts. A program has a tile of tokens and a part of a head's matrix, which it begins to read before the kernel ahead has ended;
the first programs share out the tokens' vectors. In two launches, ``triton_store`` and ``triton_heads``, queries are written and
read once more. Bound: one read of the matrices and of queries and vectors, one write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.latent.triton_store import rotate, store_tile

MOST = 64
"""Tokens up to which it is used: of 64 it takes as long as two launches, of 256 longer (133 us for 129 of half a layer, H200)."""
_FEW, _TOKENS = 16, 64
"""Tokens of a tile."""
_LATENT = 64
"""Numbers of a program's results."""


@triton.jit(do_not_specialize=["T"])
def _absorb_kernel(
    vectors, query, up, out, pages, slots, cos, sin, weight, eps, factor, T, vector_stride, query_stride, page_stride,
    slot_stride, HEADS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, V: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, SCALED: tl.constexpr, BLOCK_T: tl.constexpr, OWN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    part, head = tl.program_id(0), tl.program_id(1) - 1
    first = tl.program_id(2) * BLOCK_T
    if head < 0:
        if PDL:
            gdc_wait()
        in_tile = part * OWN + tl.arange(0, OWN)[:, None]
        own = tl.minimum(first + in_tile, T - 1).to(tl.int64)
        known = (in_tile < BLOCK_T) & (first + in_tile < T)
        store_tile(
            vectors, pages, slots, cos, sin, weight, eps, factor, own, known, vector_stride, page_stride, slot_stride, R, E, PAGE,
            INTERLEAVED, SCALED, WHOLE, HALF,
        )  # fmt: skip
    else:
        flat, made = tl.arange(0, BLOCK_N), part * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (flat < N)[:, None] & (made < R)[None, :]
        matrix = tl.load(up + (head * (N + V) + flat[:, None]) * R + made[None, :], mask=inside, other=0.0)
        if PDL:
            gdc_wait()
        tokens = first + tl.arange(0, BLOCK_T)[:, None]
        there = tokens < T
        source = query + tokens * query_stride + head * (N + E)
        target = out + (tokens * HEADS + head) * (R + E)
        taken = tl.load(source + flat[None, :], mask=there & (flat < N)[None, :], other=0.0)
        result = tl.dot(taken, matrix, input_precision="ieee")
        tl.store(target + made[None, :], result.to(out.dtype.element_ty), mask=there & (made < R)[None, :])
        if part == 0:
            angles = tl.minimum(tokens, T - 1) * E
            rotate(source + N, target + R, cos + angles, sin + angles, there, 1.0, E, INTERLEAVED, False, HALF)


def store_absorbed(
    vectors: Tensor,
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    to: KVDestination,
    *,
    weight: Tensor,
    eps: float,
    interleaved: bool,
    up: Tensor,
) -> Tensor:
    """Computes ``LatentHeads.absorb`` on the result of :func:`triton_store.store_latent`, and writes what that function writes.

    Args:
        vectors, query, cos, sin, to, weight, eps, interleaved: As :func:`triton_store.store_latent` takes them.
        up: [H, N + V, R], contiguous.

    Returns:
        [T, H, R + E].
    """
    tokens, heads, dim = query.shape
    (_, both, rank), ends = up.shape, cos.shape[-1]
    nope, pages = dim - ends, to.keys
    assert (
        vectors.stride(1) == query.stride(2) == pages.stride(3) == 1 and query.stride(1) == dim and up.is_contiguous()
    )
    out = torch.empty(tokens, heads, rank + ends, dtype=query.dtype, device=query.device)
    block, parts = _FEW if tokens <= _FEW else _TOKENS, triton.cdiv(rank, _LATENT)
    _absorb_kernel[(parts, 1 + heads, triton.cdiv(tokens, block))](
        vectors, query, up, out, pages, to.slots, cos, sin, weight, eps, 1.0 / to.scales[0], tokens, vectors.stride(0),
        query.stride(0), *pages.stride()[:2],
        HEADS=heads, R=rank, N=nope, V=both - nope, E=ends, PAGE=pages.shape[1], INTERLEAVED=interleaved,
        SCALED=pages.dtype == torch.float8_e4m3fn, BLOCK_T=block, OWN=triton.next_power_of_2(triton.cdiv(block, parts)),
        BLOCK_N=max(16, triton.next_power_of_2(nope)), BLOCK_R=_LATENT, WHOLE=triton.next_power_of_2(rank),
        HALF=triton.next_power_of_2(ends // 2), num_warps=4, **dependent_launch.options(vectors, MOST),
    )  # fmt: skip
    return out
