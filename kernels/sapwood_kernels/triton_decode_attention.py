"""Triton: attention of one new token a request over the paged cache, the keys of each request split over many programs.

Algorithm (Flash-Decoding; Dao et al., 2023): a program takes one request, one key/value head with all the query heads that share
it, and one of ``SPLITS`` stretches of the keys; it keeps a running maximum and sum (online softmax) and leaves its part of the
result with the logarithm of its sum. A second kernel adds the parts, weighted by these sums. With few requests the splits fill
the chip; a library's kernel plans that on the host, this one needs no plan, only the lengths, on the device.

Cost: one read of the keys and values; partial results of SPLITS x H x D floats a request written and read. Bound: no stretch is
longer than its share of the request's keys, rounded up to a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
_LEAST_ROWS = 16  # of a matrix unit's product


@triton.jit
def _split_kernel(
    query, keys, values, indptr, lengths, pages, part, sums, scale, softcap, slot_stride,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    length = tl.load(lengths + request)
    own = pages + tl.load(indptr + request)
    start = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(length - start, SPLITS), BLOCK) * BLOCK
    at = start + split * share
    end = tl.minimum(at + share, length)

    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    wanted = (rows < GROUP)[:, None] & (columns < D)[None, :]
    head_rows = request * heads + head * GROUP + rows
    q = tl.load(query + head_rows[:, None] * D + columns[None, :], mask=wanted, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK_D), tl.float32)
    while at < end:
        tokens = at + tl.arange(0, BLOCK)
        there = tokens < end
        page = tl.load(own + tokens // PAGE, mask=there, other=0).to(tl.int64)
        offsets = (page * PAGE + tokens % PAGE) * slot_stride + head * D
        # What lies beyond the end was never written: it is not read, for zero times NaN is NaN.
        inside = there[:, None] & (columns < D)[None, :]
        k = tl.load(keys + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        scores = tl.where(there[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - above[:, None])
        fade = tl.exp(highest - above)
        v = tl.load(values + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
        result = result * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, axis=1)
        highest = above
        at += BLOCK
    empty = total == 0.0
    result = result / tl.where(empty, 1.0, total)[:, None]
    slots = head_rows * SPLITS + split
    tl.store(part + slots[:, None] * D + columns[None, :], result, mask=wanted)
    tl.store(sums + slots, tl.where(empty, float("-inf"), highest + tl.log(total)), mask=rows < GROUP)


@triton.jit
def _merge_kernel(part, sums, out, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    logs = tl.load(sums + row * SPLITS + splits)
    weights = tl.exp(logs - tl.max(logs, axis=0))
    weights /= tl.sum(weights, axis=0)
    inside = (columns < D)[None, :]
    parts = tl.load(part + (row * SPLITS + splits)[:, None] * D + columns[None, :], mask=inside, other=0.0)
    result = tl.sum(parts * weights[:, None], axis=0)
    tl.store(out + row * D + columns, result.to(out.dtype.element_ty), mask=columns < D)


def num_splits(batch: int, kv_heads: int, processors: int) -> int:
    """How many programs share a request's keys: as many as fill the chip up to four times; a power of 2, at most 32.

    Within 5 % of the best of those tried on an H200 for up to 16 requests of 1100 to 8192 keys.
    """
    most = 4 * processors // (batch * kv_heads)
    return min(32, 1 << max(0, most.bit_length() - 1))


def decode_attention(
    query: Tensor,
    key_slots: Tensor,
    value_slots: Tensor,
    indptr: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_size: int,
    *,
    splits: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As ``reference.paged_attention`` with one query token a request; nothing is read on the host.

    Args:
        query: [B, H, D], contiguous.
        key_slots: [S, K, D], contiguous.
        value_slots: [S, K, D], contiguous.
        indptr: int32 [B + 1]: request i's pages begin at ``pages[indptr[i]]``.
        pages: int32, page ids.
        lengths: int32 [B]: keys of each request, at least 1.
        page_size: Slots a page.
        splits: Programs a request and key/value head: a power of 2; see :func:`num_splits`.
        scale: See ``reference.attention``, with ``window`` and ``softcap``.

    Returns:
        [B, H, D].
    """
    batch, heads, dim = query.shape
    kv_heads = key_slots.shape[1]
    group = heads // kv_heads
    part = torch.empty((batch * heads, splits, dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((batch * heads, splits), dtype=torch.float32, device=query.device)
    out = torch.empty_like(query)
    block_d = max(16, triton.next_power_of_2(dim))
    _split_kernel[(batch, kv_heads, splits)](
        query, key_slots, value_slots, indptr, lengths, pages, part, sums, scale, softcap or 1.0, key_slots.stride(0),
        GROUP=group, D=dim, PAGE=page_size, SPLITS=splits, WINDOW=window or 0, CAPPED=softcap is not None,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), BLOCK_D=block_d, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _merge_kernel[(batch * heads,)](part, sums, out, D=dim, SPLITS=splits, BLOCK_D=block_d, num_warps=1)
    return out
