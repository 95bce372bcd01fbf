"""Triton: what a chunk's tokens undo of each other in the gated delta rule, before the state is known.

For the chunk's keys k of length one, strengths b and sums G of the logarithms of decays, the written values u solve

    (I + A) u = b (v - e^G S' k),   A[i, j] = b_i (k_i . k_j) e^(G_i - G_j) for j < i

so this computes (I + A)^-1 diag(b) for all chunks and heads at once. Algorithm: forward substitution within blocks of 16 tokens,
D = I + A's blocks on the diagonal; the rest, M = D^-1 (I + A) - I, has only blocks below the diagonal, so M^4 = 0 and
(I + A)^-1 = (I - M) (I + M^2) D^-1.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.state.spans import CHUNK, Spans
from sapwood_kernels.state.triton_math import chunk_decays

_EPS = tl.constexpr(1e-6)


@triton.jit
def _length(x, factor):
    """What makes each row's length ``factor``."""
    return factor * tl.rsqrt(tl.sum(x * x, axis=1) + _EPS)


@triton.jit
def _inverse_kernel(
    qk, decay, strength, chunks, inverse, q_factors, k_factors, stride, HEADS, scale,
    SHARED: tl.constexpr, KEYS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    table = chunks + 3 * tl.program_id(0)
    begin, end = tl.load(table), tl.load(table + 1)
    head = tl.program_id(1)
    steps = tl.arange(0, CHUNK)
    tokens = (begin + steps).to(tl.int64)
    live = begin + steps < end
    columns = tl.arange(0, BLOCK_K)
    inside = live[:, None] & (columns < KEYS)[None, :]
    key_head = head // SHARED
    at = qk + tokens[:, None] * stride + key_head * KEYS + columns[None, :]
    q = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    q_factor = _length(q, scale)
    k = tl.load(at + HEADS // SHARED * KEYS, mask=inside, other=0.0)
    k_factor = _length(k.to(tl.float32), 1.0)
    per_head = tokens * HEADS + head
    tl.store(q_factors + per_head, q_factor, mask=live)
    tl.store(k_factors + per_head, k_factor, mask=live)
    left = chunk_decays(tl.load(decay + per_head, mask=live, other=0.0), steps)[3]
    beta = tl.load(strength + per_head, mask=live, other=0.0)
    rows, others = steps[:, None], steps[None, :]
    a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (beta * k_factor)[:, None] * k_factor[None, :]
    a = tl.where(rows > others, a * left, 0.0)

    # The inverses of the blocks on the diagonal, row by row: [blocks, 16, 16].
    blocks, small = tl.arange(0, BLOCKS), tl.arange(0, 16)
    split = tl.permute(tl.reshape(a, (BLOCKS, 16, BLOCKS, 16)), (0, 2, 1, 3))
    same = blocks[:, None, None, None] == blocks[None, :, None, None]
    diagonal = tl.sum(tl.where(same, split, 0.0), axis=1)
    solved = tl.where(small[None, :, None] == small[None, None, :], 1.0, tl.zeros((BLOCKS, 16, 16), tl.float32))
    for row in range(1, 16):
        here = small[None, :, None] == row
        factors = tl.sum(tl.where(here, diagonal, 0.0), axis=1)  # [blocks, 16]: zeros from the row on
        change = tl.sum(factors[:, :, None] * solved, axis=1)
        solved -= tl.where(here, change[:, None, :], 0.0)
    spread = tl.where(same, solved[:, None, :, :], 0.0)
    result = tl.reshape(tl.permute(spread, (0, 2, 1, 3)), (CHUNK, CHUNK))

    below = tl.where(rows // 16 > others // 16, a, 0.0)
    m = tl.dot(result, below, input_precision=PRECISION)
    result += tl.dot(tl.dot(m, m, input_precision=PRECISION), result, input_precision=PRECISION)
    result -= tl.dot(m, result, input_precision=PRECISION)
    where = inverse + per_head[:, None] * CHUNK + others
    tl.store(where, (result * beta[None, :]).to(inverse.dtype.element_ty), mask=live[:, None])


def inverses(
    qk: Tensor, decay: Tensor, strength: Tensor, spans: Spans, key_heads: int, keys: int, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Solves the systems of all chunks.

    Args:
        qk: [T, 2 key heads * keys, ...], its rows contiguous: queries, then keys, then what is not read.
        decay: float32 [T, H], contiguous, at most 0: the logarithm of each step's factor. H is a multiple of the key heads.
        strength: float32 [T, H], contiguous.
        spans: Which tokens; the others are not written.
        key_heads: Heads of keys.
        keys: Elements of a key.
        precision: Of products of float32, as ``tl.dot`` takes it.

    Returns:
        The inverses [T, H, CHUNK] in the dtype of ``qk``, a row for each token of a chunk; and the factors that make the length
        of keys one, and that of queries ``keys ** -0.5``: queries', then keys', float32 [T, H].
    """
    count, heads = decay.shape
    inverse = torch.empty(count, heads, CHUNK, dtype=qk.dtype, device=qk.device)
    q_factors, k_factors = torch.empty_like(decay), torch.empty_like(decay)
    _inverse_kernel[(len(spans.chunks), heads)](
        qk, decay, strength, spans.chunks, inverse, q_factors, k_factors, qk.stride(0), heads, keys**-0.5,
        SHARED=heads // key_heads, KEYS=keys, BLOCK_K=max(16, triton.next_power_of_2(keys)), CHUNK=CHUNK, BLOCKS=CHUNK // 16,
        PRECISION=precision, num_warps=4,
    )  # fmt: skip
    return inverse, q_factors, k_factors
