"""Triton: latent attention (MLA) of one new token for each request, absorbed, over the paged cache.

All heads of a layer read the same cached vectors, so a program takes a block of heads of one request and one of up to
``SPLITS`` stretches of its keys. A block of vectors is read once: all of it meets the queries, and its latent part is also
what is summed up. Stretches and their merging are those of ``triton_decode``. Bound: one read of the vectors for
each block of 16 heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.attention.latent.triton_merge_values import keys_of_stretch, merge_values
from sapwood_kernels.attention.latent.triton_shared import HEADS_OF_BLOCK, attend_latent, attend_shared_latent
from sapwood_kernels.attention.triton_block import LOG2_E
from sapwood_kernels.attention.triton_decode import SharedWork, fetch_keys
from sapwood_kernels.attention.triton_parts import first_own_key, merge_parts, num_stretches

_MANY = 16
"""Stretches of a request above which they are short."""


@triton.jit(do_not_specialize_on_alignment=["starts", "counts"])
def _latent_kernel(
    query, stored, indptr, lengths, starts, counts, pages, part, sums, out, scale, value_scale, page_stride, slot_stride,
    HEADS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    LEAST: tl.constexpr, SHARED: tl.constexpr, FLOAT8: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, JOINED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    # Data from before the step, lengths and pages, is read while the kernel ahead runs.
    request, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    own = pages + tl.load(indptr + request)
    start = first_own_key(length, starts, request, 0, SHARED)
    count = num_stretches(length - start, LEAST, SPLITS)
    others = tl.load(counts + request) if SHARED else 0
    share = keys_of_stretch(length - start, count, BLOCK)
    if JOINED:
        count = tl.cdiv(length - start, share)
    if split < count:
        at = start + split * share
        end = tl.minimum(at + share, length)
        if PDL:
            if at < end:
                fetch_keys(stored, own, at, end, page_stride, slot_stride, R + E, PAGE, BLOCK)
            gdc_wait()
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
        highest, total, result = attend_latent(
            q, turned, stored, own, at, end, page_stride, slot_stride, scale, R, E, PAGE, ROWS, BLOCK_R, BLOCK_E, BLOCK, STAGES,
        )  # fmt: skip
        empty = total == 0.0
        result = result / tl.where(empty, 1.0, total)[:, None] * value_scale
        if count + others == 1 and not JOINED:
            tl.store(out + rows[:, None] * R + columns[None, :], result.to(out.dtype.element_ty), mask=wanted)
        else:
            slots = rows * SLOTS + split
            tl.store(part + slots[:, None] * R + columns[None, :], result, mask=wanted)
            tl.store(sums + slots, tl.where(empty, float("-inf"), highest + tl.log2(total)), mask=heads < HEADS)


def tile_of(splits: int) -> tuple[int, int, int]:
    """Keys of a block, warps and Triton's stages for up to this many stretches: 256 requests of 1024 vectors took an H200 112 us
    by the first, 136 by the second."""
    return (64, 8, 2) if splits <= _MANY else (32, 4, 2)


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
    shared: SharedWork | None = None,
    values_by: tuple[Tensor, int] | None = None,
) -> Tensor:
    """The attention of absorbed queries, one token for each request, over cached vectors; does not wait for the device.

    Args:
        query: [B, H, R + E], contiguous.
        stored: [P, S, 1, R + E] in any order except that the last stays last, of the query's dtype or float8_e4m3fn.
        rank: R.
        indptr: int32 [B + 1]: request i's pages begin at ``pages[indptr[i]]``.
        pages: int32, page ids.
        lengths: int32 [B]: keys of each request, at least 1.
        splits: Most programs for a request and a block of heads, a power of 2, as ``triton_decode.num_splits`` gives it.
        scale: Factor of the dot products.
        least: The fewest keys of a program, for each number of requests.
        kv_scale: Factor of the stored numbers.
        shared: The keys that several requests share and that are read once; None: each request reads all its keys.
        values_by: ``up`` and ``nope`` of ``LatentHeads``: the sum is expanded to the heads' values where its parts are added.

    Returns:
        [B, H, R]; [B, H, V] with ``values_by``.
    """
    batch, heads, dim = query.shape
    assert stored.stride(3) == 1 and query.is_contiguous()
    slots = splits + (0 if shared is None else shared.slots)
    part = torch.empty((batch * heads, slots, rank), dtype=torch.float32, device=query.device)
    sums = torch.empty((batch * heads, slots), dtype=torch.float32, device=query.device)
    starts, counts = (lengths, lengths) if shared is None else (shared.starts, shared.counts)
    if shared is not None:
        attend_shared_latent(
            query,
            stored,
            rank,
            indptr,
            pages,
            shared.order,
            shared.items,
            part,
            sums,
            splits,
            scale=scale,
            kv_scale=kv_scale,
        )
    out = torch.empty(batch, heads, rank, dtype=query.dtype, device=query.device)
    block_r, block_e = (max(16, triton.next_power_of_2(size)) for size in (rank, dim - rank))
    block, warps, stages = tile_of(splits)
    _latent_kernel[(triton.cdiv(heads, HEADS_OF_BLOCK), batch, splits)](
        query, stored, indptr, lengths, starts, counts, pages, part, sums, out, scale * kv_scale, kv_scale, *stored.stride()[:2],
        HEADS=heads, R=rank, E=dim - rank, PAGE=stored.shape[1], SPLITS=splits, SLOTS=slots, LEAST=least,
        SHARED=shared is not None, FLOAT8=stored.dtype == torch.float8_e4m3fn, ROWS=HEADS_OF_BLOCK, BLOCK_R=block_r,
        BLOCK_E=block_e, BLOCK=block, STAGES=stages if query.is_cuda else 0, JOINED=values_by is not None, num_warps=warps,
        **dependent_launch.options(query),
    )  # fmt: skip
    if values_by is not None:
        up, nope = values_by
        return merge_values(
            part, sums, lengths, starts, counts, up, nope, splits=splits, least=least, keys=block, shared=shared is not None,
            dtype=query.dtype,
        )  # fmt: skip
    if slots > 1:
        merge_parts(part, sums, lengths, starts, counts, out, splits=splits, least=least, shared=shared is not None)
    return out
