"""Gluon: latent attention (MLA) of one new token for each of many requests, absorbed, by programs that read without a pause.

There is a program for each multiprocessor: a warp fills a ring in shared memory by the bulk copy engine, with a request's queries
with its first vectors, and four multiply. A block of 64 vectors is the left side of ``wgmma``, the heads' queries, and then
the weights, are the right side: so a product has no idle rows, whatever multiple of 8 the heads are, and takes the vectors from
where they lie.

Programs take equal shares of the blocks of keys of all requests (stream-K: Osama et al. 2023, arXiv:2301.03598), from the end of
a share backwards. The beginning and end of a request take as long as ``BEGIN`` blocks, and count as that many more of its blocks.
So none outlasts the others, however uneven the requests are, also where rows of one key pad a step; and the next request's
vectors are under way while one ends. If a request's keys end in another program's share, a program computes its part first and
leaves it in ``part`` with a flag. The program with the request's last block adds all earlier parts. It waits for programs
before it only, which have begun before it, and for what each of them did first; it clears their flags for the next launch.

Bound: one read of the vectors for all heads, O(B) numbers a program for its share, and at most one part a program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 and later ones name these differently.
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_seen_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

_LOG2_E = gl.constexpr(1.4426950408889634)
_PAGE = 16
_MOST_HEADS = 16  # a thread's share of more results does not fit in its registers
_LEAST = 24
"""Requests from which it is worth its longer start."""
_BEGIN = 2
"""Blocks that beginning and ending a request count as. 225 requests of 745 keys on average and 31 rows that pad took an H200
142 us a layer when it counted 0, and 79, 66, 64 and 64 for 1 to 4 (queries fetched apart). With 2, and queries fetched with
the
vectors: 57."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _fill(
    query, stored, indptr, lengths, pages, latent, turned, q_latent, q_turned, ready, free, begin, end, request, block, length,
    HEADS: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, PAGE_ROWS: gl.constexpr, STAGES: gl.constexpr, BEGIN: gl.constexpr,
):  # fmt: skip
    """Loads pages of the cache into the ring of buffers in shared memory; one warp of each program does this."""
    own = gl.load(indptr + request)
    turn = 0
    asked, fresh = 0, 1
    while end > begin:
        stage = turn % STAGES
        last = (length - 1) // 16
        # Behind the last page comes the first one once more, whose numbers are finite.
        at = block * 4
        a = gl.load(pages + own + at) * PAGE_ROWS
        b = gl.load(pages + own + gl.where(at < last, at + 1, 0)) * PAGE_ROWS
        c = gl.load(pages + own + gl.where(at + 1 < last, at + 2, 0)) * PAGE_ROWS
        d = gl.load(pages + own + gl.where(at + 2 < last, at + 3, 0)) * PAGE_ROWS
        rows = (a, b, c, d)
        mbarrier.wait(free.index(stage), turn // STAGES & 1 ^ 1)
        # Once it is free, the queries of the second last request are no longer needed.
        if fresh > 0:
            buffer = asked % 2
            mbarrier.expect(ready.index(stage), (64 + ROWS) * (R + 64) * 2)
            for chunk in gl.static_range(R // 64):
                _fetch(
                    query, [request * HEADS, chunk * 64], ready.index(stage), q_latent.index(buffer * (R // 64) + chunk)
                )
            _fetch(query, [request * HEADS, R], ready.index(stage), q_turned.index(buffer))
            asked += 1
            fresh = 0
        else:
            mbarrier.expect(ready.index(stage), 64 * (R + 64) * 2)
        for chunk in gl.static_range(R // 64):
            for p in gl.static_range(4):
                _fetch(
                    stored, [rows[p], chunk * 64], ready.index(stage), latent.index((stage * (R // 64) + chunk) * 4 + p)
                )
        for p in gl.static_range(4):
            _fetch(stored, [rows[p], R], ready.index(stage), turned.index(stage * 4 + p))
        turn += 1
        end -= 1
        block -= 1
        if block < 0:
            end -= BEGIN
            fresh = 1
            request = gl.maximum(request - 1, 0)
            own = gl.load(indptr + request)
            length = gl.load(lengths + request)
            block = (length + 63) // 64 - 1


@gluon.jit
def _attend(
    lengths, part, sums, flags, out, scale, latent_pages, turned_pages, q_chunks, q_turned, given, ready, free, begin, end,
    share, request, start, length, HEADS: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    BEGIN: gl.constexpr,
):  # fmt: skip
    """Four warps' part of a program."""
    dtype: gl.constexpr = latent_pages.dtype
    ring: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    latent = _seen_as(latent_pages, dtype, [STAGES, 64, R], ring)
    turned = _seen_as(turned_pages, dtype, [STAGES, 64, 64], ring)
    q_latent = _seen_as(q_chunks, dtype, [2, ROWS, R], ring)
    program = gl.program_id(0)
    count = (length + 63) // 64
    block = end - 1 - start
    keys_here = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, mma)), 1)
    heads = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
    dims = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, mma)), 1)
    scale *= _LOG2_E
    turn = 0
    asked = 0
    while end > begin:
        first = gl.maximum(start, begin)
        buffer = asked % 2
        asked += 1
        highest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
        sums_ = gl.zeros([64, ROWS], gl.float32, mma)
        result = gl.zeros([R, ROWS], gl.float32, mma)
        for _ in range(first, end):
            stage = turn % STAGES
            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            scores = warpgroup_mma(
                latent.index(stage),
                q_latent.index(buffer).permute((1, 0)),
                gl.zeros([64, ROWS], gl.float32, mma),
                is_async=True,
            )
            scores = warpgroup_mma(turned.index(stage), q_turned.index(buffer).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores *= scale
            valid = length - block * 64
            if valid < 64:  # the rest was never written, and zero times NaN is NaN
                scores = gl.where(keys_here < valid, scores, float("-inf"))
                if valid % 16 > 0:
                    row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, narrow)), 1)
                    for p in range(valid // 16, gl.where(length < 16, 4, valid // 16 + 1)):
                        for chunk in gl.static_range(R // 64):
                            place = latent_pages.index((stage * (R // 64) + chunk) * 4 + p)
                            place.store(gl.where(row < valid % 16, place.load(narrow), 0.0))
                    fence_async_shared()
            above = gl.maximum(highest, gl.max(scores, 0))
            weights = gl.exp2(scores - gl.expand_dims(above, 0))
            fade = gl.exp2(highest - above)
            highest = above
            given.permute((1, 0)).store(weights.to(dtype))
            fence_async_shared()
            fading = gl.expand_dims(fade, 0)
            sums_ = sums_ * fading + weights
            result = result * fading
            _together()
            result = warpgroup_mma(latent.index(stage).permute((1, 0)), given.permute((1, 0)), result, is_async=True)
            result = warpgroup_mma_wait(0, deps=[result])
            mbarrier.arrive(free.index(stage), count=1)
            block -= 1
            turn += 1
        sum_ = gl.sum(sums_, 0)
        part_at = dims * ROWS + gl.expand_dims(heads, 0)
        if end == start + count:
            if first > start:
                for other in range(start // share, program):
                    while gl.atomic_add(flags + other, 0, sem="acquire") == 0:
                        pass
                    others = gl.load(sums + other * 2 * ROWS + heads, cache_modifier=".cg")
                    more = gl.load(sums + (other * 2 + 1) * ROWS + heads, cache_modifier=".cg")
                    above = gl.maximum(highest, others)
                    fade, rise = gl.exp2(highest - above), gl.exp2(others - above)
                    highest = above
                    sum_ = sum_ * fade + more * rise
                    added = gl.load(part + other * ROWS * R + part_at, cache_modifier=".cg")
                    result = result * gl.expand_dims(fade, 0) + added * gl.expand_dims(rise, 0)
                    _together()
                    gl.atomic_xchg(flags + other, 0, sem="relaxed")
            made = (result / gl.expand_dims(sum_, 0)).to(dtype)
            out_at = out + (request * HEADS + gl.expand_dims(heads, 0)) * R + dims
            gl.store(out_at, made, mask=(gl.expand_dims(heads, 0) < HEADS) & (dims >= 0))
        else:
            gl.store(sums + program * 2 * ROWS + heads, highest)
            gl.store(sums + (program * 2 + 1) * ROWS + heads, sum_)
            gl.store(part + program * ROWS * R + part_at, result)
            _together()
            gl.atomic_xchg(flags + program, 1, sem="release")
        end = start - BEGIN
        request = gl.maximum(request - 1, 0)
        length = gl.load(lengths + request)
        count = (length + 63) // 64
        start = end - count
        block = count - 1


@gluon.jit(do_not_specialize=["batch"])
def _latent_stream_kernel(
    query, stored, indptr, lengths, pages, part, sums, flags, out, scale, batch, HEADS: gl.constexpr, R: gl.constexpr,
    PAGE_ROWS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BATCH: gl.constexpr, BEGIN: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype.element_ty
    ring: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    latent = gl.allocate_shared_memory(dtype, [STAGES * (R // 64) * 4, 16, 64], ring)
    turned = gl.allocate_shared_memory(dtype, [STAGES * 4, 16, 64], ring)
    q_latent = gl.allocate_shared_memory(dtype, [2 * (R // 64), ROWS, 64], ring)
    q_turned = gl.allocate_shared_memory(dtype, [2, ROWS, 64], ring)
    given = gl.allocate_shared_memory(dtype, [ROWS, 64], ring)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    # Blocks up to each request's end, and the share of them.
    line: gl.constexpr = gl.BlockedLayout([BATCH // 128], [32], [4], [0])
    each = gl.arange(0, BATCH, line)
    blocks = (gl.load(lengths + each, mask=each < batch, other=0) + 63) // 64
    costs = gl.where(each < batch, blocks + BEGIN, 0)
    upto = gl.associative_scan(costs, 0, _add)
    total = gl.sum(costs, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)
    # The last request whose first block is in the share or before it. A share may end among what counts before the next one's.
    begun = (upto - blocks < end) & (each < batch)
    request = gl.maximum(gl.sum(begun.to(gl.int32), 0) - 1, 0)
    length = gl.load(lengths + request)
    upto_own = gl.sum(gl.where(begun, costs, 0), 0)
    start = upto_own - (length + 63) // 64
    end = gl.minimum(end, upto_own)
    gl.warp_specialize(
        [
            (_attend, (lengths, part, sums, flags, out, scale, latent, turned, q_latent, q_turned, given, ready, free,
                       begin, end, share, request, start, length, HEADS, R, ROWS, STAGES, BEGIN)),
            (_fill, (query, stored, indptr, lengths, pages, latent, turned, q_latent, q_turned, ready, free, begin, end, request,
                     end - 1 - start, length, HEADS, R, ROWS, PAGE_ROWS, STAGES, BEGIN)),
        ],
        [1],
        [64],
    )  # fmt: skip


def serves(query: Tensor, stored: Tensor, rank: int) -> bool:
    """Whether it takes absorbed queries [B, H, R + E] and vectors stored so, and is worth it."""
    batch, heads, dim = query.shape
    alike = query.dtype == stored.dtype and query.dtype in (torch.bfloat16, torch.float16)
    shaped = heads <= _MOST_HEADS and (rank, dim - rank) == (512, 64) and stored.shape[1] == _PAGE
    laid_out = query.is_contiguous() and stored.is_contiguous()
    return batch >= _LEAST and alike and shaped and laid_out and _is_able(stored.device)


@cache
def _is_able(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9  # wgmma is Hopper's alone


def latent_stream(
    query: Tensor,
    stored: Tensor,
    rank: int,
    indptr: Tensor,
    pages: Tensor,
    lengths: Tensor,
    flags: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The attention of absorbed queries, one token for each request, over cached vectors; does not wait for the device.

    Args:
        query: [B, H, R + E], contiguous; with ``stored`` one that it :func:`serves`.
        stored: [P, S, 1, R + E].
        rank: R.
        indptr: int32 [B + 1]: request i's pages begin at ``pages[indptr[i]]``.
        pages: int32, page ids.
        lengths: int32 [B]: keys of each request, at least 1.
        flags: int32, zeros, one for each multiprocessor; zeros again once it has ended. No two launches may share them at once.
        scale: Factor of the dot products.

    Returns:
        [B, H, R].
    """
    batch, heads, dim = query.shape
    programs = len(flags)
    rows = 8 if heads <= 8 else _MOST_HEADS
    out = torch.empty(batch, heads, rank, dtype=query.dtype, device=query.device)
    part = torch.empty(programs, rank * rows, dtype=torch.float32, device=query.device)
    sums = torch.empty(programs, 2 * rows, dtype=torch.float32, device=query.device)
    ring = gl.NVMMASharedLayout(128, 16, 2)
    _latent_stream_kernel[(programs,)](
        TensorDescriptor.from_tensor(query.view(-1, dim), [rows, 64], ring),
        TensorDescriptor.from_tensor(stored.view(-1, dim), [_PAGE, 64], ring), indptr, lengths, pages, part, sums, flags,
        out, scale, batch, HEADS=heads, R=rank, PAGE_ROWS=_PAGE, ROWS=rows, STAGES=2,
        BATCH=max(256, triton.next_power_of_2(batch)), BEGIN=_BEGIN, num_warps=4,
    )  # fmt: skip
    return out
