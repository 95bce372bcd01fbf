"""Triton: latent attention (MLA) of one new token for each request, absorbed, over the paged cache.

All heads of a layer read the same cached vectors, so a program takes a block of heads of one request and one of up to
``SPLITS`` stretches of its keys. A block of vectors is read once: all of it meets the queries, and its latent part is also
what is summed up. Stretches and their merging are those of ``triton_decode``. Bound: one read of the vectors for
each block of 16 heads. Nothing of it has been measured on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention.triton_block import LOG2_E
from sapwood_kernels.attention.triton_decode import _merge_kernel, _stretches

HEADS_OF_BLOCK = 16
"""Heads of a program: the fewest rows of a matrix unit's product."""
_KEYS_OF_BLOCK, _WARPS, _STAGES = 32, 4, 2


@triton.jit
def _block(
    q, turned, stored, own, at, end, page_stride, slot_stride, highest, total, result, scale,
    R: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of vectors, taken into the running maximum, sum and result; scores are in powers of 2."""
    columns, ends = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    tokens = at + tl.arange(0, BLOCK)
    there = tokens < end
    page = tl.load(own + tokens // PAGE, mask=there, other=0).to(tl.int64)
    vectors = stored + (page * page_stride + tokens % PAGE * slot_stride)[:, None]
    # What lies beyond the end was never written: it is not read, for zero times NaN is NaN.
    latent = tl.load(vectors + columns[None, :], mask=there[:, None] & (columns < R)[None, :], other=0.0).to(q.dtype)
    rotary = tl.load(vectors + R + ends[None, :], mask=there[:, None] & (ends < E)[None, :], other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(turned, tl.trans(rotary), scores, input_precision="ieee") * scale
    scores = tl.where(there[None, :], scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - above[:, None])
    fade = tl.exp2(highest - above)
    result = result * fade[:, None] + tl.dot(weights.to(q.dtype), latent, input_precision="ieee")
    return above, total * fade + tl.sum(weights, axis=1), result


@triton.jit
def _latent_kernel(
    query, stored, indptr, lengths, pages, part, sums, out, scale, value_scale, page_stride, slot_stride,
    HEADS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    FLOAT8: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    own = pages + tl.load(indptr + request)
    count = _stretches(length, LEAST, SPLITS)
    if split < count:
        share = tl.cdiv(tl.cdiv(length, count), BLOCK) * BLOCK
        at = split * share
        end = tl.minimum(at + share, length)
        heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns, ends = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
        wanted = (heads < HEADS)[:, None] & (columns < R)[None, :]
        rows = request * HEADS + heads
        queries = query + rows[:, None] * (R + E)
        q = tl.load(queries + columns[None, :], mask=wanted, other=0.0)
        turned = tl.load(queries + R + ends[None, :], mask=(heads < HEADS)[:, None] & (ends < E)[None, :], other=0.0)
        if FLOAT8:
            q, turned = q.to(tl.float16), turned.to(tl.float16)
        scale *= LOG2_E
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, BLOCK_R), tl.float32)
        if STAGES > 0:
            for block in tl.range(at, end, BLOCK, num_stages=STAGES):
                highest, total, result = _block(
                    q, turned, stored, own, block, end, page_stride, slot_stride, highest, total, result, scale,
                    R, E, PAGE, BLOCK_R, BLOCK_E, BLOCK,
                )  # fmt: skip
        else:  # Triton's interpreter cannot run such loops
            while at < end:
                highest, total, result = _block(
                    q, turned, stored, own, at, end, page_stride, slot_stride, highest, total, result, scale,
                    R, E, PAGE, BLOCK_R, BLOCK_E, BLOCK,
                )  # fmt: skip
                at += BLOCK
        empty = total == 0.0
        result = result / tl.where(empty, 1.0, total)[:, None] * value_scale
        if count == 1:
            tl.store(out + rows[:, None] * R + columns[None, :], result.to(out.dtype.element_ty), mask=wanted)
        else:
            slots = rows * SPLITS + split
            tl.store(part + slots[:, None] * R + columns[None, :], result, mask=wanted)
            tl.store(sums + slots, tl.where(empty, float("-inf"), highest + tl.log2(total)), mask=heads < HEADS)


def latent_decode(
    query: Tensor,
    stored: Tensor,
    rank: int,
    indptr: Tensor,
    pages: Tensor,
    lengths: Tensor,
    *,
    splits: int,
    scale: float,
    least: int = 1,
    kv_scale: float = 1.0,
) -> Tensor:
    """What the absorbed queries of one token for each request sum up of cached vectors; does not wait for the device.

    Args:
        query: [B, H, R + E], contiguous.
        stored: [P, S, 1, R + E] in any order but for the last, of the query's dtype or float8_e4m3fn.
        rank: R.
        indptr: int32 [B + 1]: request i's pages begin at ``pages[indptr[i]]``.
        pages: int32, page ids.
        lengths: int32 [B]: keys of each request, at least 1.
        splits: Most programs for a request and a block of heads, a power of 2, as ``triton_decode.num_splits`` gives it.
        scale: Factor of the dot products.
        least: Fewest keys of a program, likewise.
        kv_scale: Factor of the stored numbers.

    Returns:
        [B, H, R].
    """
    batch, heads, dim = query.shape
    assert stored.stride(3) == 1 and query.is_contiguous()
    part = torch.empty((batch * heads, splits, rank), dtype=torch.float32, device=query.device)
    sums = torch.empty((batch * heads, splits), dtype=torch.float32, device=query.device)
    out = torch.empty(batch, heads, rank, dtype=query.dtype, device=query.device)
    block_r, block_e = (max(16, triton.next_power_of_2(size)) for size in (rank, dim - rank))
    _latent_kernel[(triton.cdiv(heads, HEADS_OF_BLOCK), batch, splits)](
        query, stored, indptr, lengths, pages, part, sums, out, scale * kv_scale, kv_scale, *stored.stride()[:2],
        HEADS=heads, R=rank, E=dim - rank, PAGE=stored.shape[1], SPLITS=splits, LEAST=least,
        FLOAT8=stored.dtype == torch.float8_e4m3fn, ROWS=HEADS_OF_BLOCK, BLOCK_R=block_r, BLOCK_E=block_e,
        BLOCK=_KEYS_OF_BLOCK, STAGES=_STAGES if query.is_cuda else 0, num_warps=_WARPS,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(batch * heads,)](
            part, sums, lengths, lengths, lengths, out, HEADS=heads, D=rank, SPLITS=splits, SLOTS=splits, LEAST=least, WINDOW=0,
            SHARED=False, BLOCK_D=block_r, BLOCK=splits, num_warps=1,
        )  # fmt: skip
    return out
