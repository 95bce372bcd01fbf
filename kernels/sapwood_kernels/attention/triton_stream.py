"""Gluon: attention of one new token for each of many requests over the paged cache, by programs that read without a pause.

A program is one warp. So many as run at once take equal shares of the blocks of keys of all requests and key/value heads
(stream-K: Osama et al. 2023, arXiv:2301.03598), from the end of a share backwards. So none outlasts the others, however uneven
the requests are, and what it reads, by the bulk copy engine, is ahead of what it computes beyond the end of a request, where
programs of ``triton_decode`` end and others begin.

What a program has of a request whose keys end in another's share, it takes first and leaves in ``part`` with a flag; the program
that has the request's last block adds all that lies before its own. It waits for programs before it only, which have begun before
it, and for what each of them did first; it clears their flags for the next launch.

Bound: one read of the keys and values, O(B) numbers a program for its share, and at most one part a program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 and later ones name these differently.
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_seen_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

PROGRAMS = 6
"""For each multiprocessor: their rings fill its shared memory."""
_STAGES = gl.constexpr(2)  # blocks that a ring has room for
_KEYS = gl.constexpr(32)  # of a block
_PAGE = gl.constexpr(16)
_DIM = gl.constexpr(128)
_ROWS = gl.constexpr(16)  # the fewest of a matrix unit's product
_LOG2_E = gl.constexpr(1.4426950408889634)
_LEAST, _MOST_HEADS = 48, 4
"""Requests from which on, and key/value heads up to which, it is worth its longer start: 256 requests of 8 heads take as long."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _rows(pages, own, block, length, PAGE_ROWS: gl.constexpr):
    """The first rows of a block's two pages; beyond the last page that of the last one again."""
    last = (length - 1) // _PAGE
    a = gl.load(pages + own + gl.minimum(block * 2, last)) * PAGE_ROWS
    b = gl.load(pages + own + gl.minimum(block * 2 + 1, last)) * PAGE_ROWS
    return a, b


@gluon.jit
def _before(lengths, indptr, request, head, block, own, length, KV_HEADS: gl.constexpr):
    """The block before one: of the same request and head, or the last of those before them."""
    block -= 1
    if block < 0:
        head -= 1
        if head < 0:
            head = head + KV_HEADS
            request = gl.maximum(request - 1, 0)
            own = gl.load(indptr + request)
            length = gl.load(lengths + request)
        block = (length + _KEYS - 1) // _KEYS - 1
    return request, head, block, own, length


@gluon.jit
def _issue(keys, values, k_pages, v_pages, ready, stage, there, head, rows):
    """Has a block's keys and values come to a place of the rings."""
    mbarrier.expect(ready.index(stage), 4 * _KEYS * _DIM, pred=there)
    for p in gl.static_range(2):
        row = rows[p] + head * _PAGE
        for half in gl.static_range(2):
            at = (stage * 2 + half) * 2 + p
            _fetch(keys, [row, half * 64], ready.index(stage), k_pages.index(at), pred=there)
            _fetch(values, [row, half * 64], ready.index(stage), v_pages.index(at), pred=there)


@gluon.jit(do_not_specialize=["batch"])
def _stream_kernel(
    query, keys, values, indptr, lengths, pages, part, sums, flags, out, scale, batch, GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr, PAGE_ROWS: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    whole: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    ring: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Halves of a block's keys and values, and the pages that they consist of.
    k_pages = gl.allocate_shared_memory(dtype, [_STAGES * 4, _PAGE, 64], ring)
    v_pages = gl.allocate_shared_memory(dtype, [_STAGES * 4, _PAGE, 64], ring)
    k_ring = _seen_as(k_pages, dtype, [_STAGES * 2, _KEYS, 64], ring)
    v_ring = _seen_as(v_pages, dtype, [_STAGES * 2, _KEYS, 64], ring)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(_STAGES):
        mbarrier.init(ready.index(s), count=1)

    program = gl.program_id(0)
    # Blocks up to each request, and the share of them.
    line: gl.constexpr = gl.BlockedLayout([BATCH // 32], [32], [1], [0])
    each = gl.arange(0, BATCH, line)
    every = gl.load(lengths + each, mask=each < batch, other=0)
    firsts = gl.load(indptr + each, mask=each < batch, other=0)  # before it is known whose is wanted
    blocks = (every + (_KEYS - 1)) // _KEYS * KV_HEADS
    upto = gl.associative_scan(blocks, 0, _add)
    total = gl.sum(blocks, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = program * share
    end = gl.minimum(begin + share, total)
    passed = upto <= end - 1
    request = gl.minimum(gl.sum(passed.to(gl.int32), 0), batch - 1)
    start = gl.sum(gl.where(passed, blocks, 0), 0)
    length = gl.sum(gl.where(each == request, every, 0), 0)
    own = gl.sum(gl.where(each == request, firsts, 0), 0)
    count = (length + _KEYS - 1) // _KEYS
    head = (end - 1 - start) // count
    start += head * count  # the first block of the request and head
    block = end - 1 - start
    if end > begin:
        # What is read is ahead of what is computed.
        ahead_request, ahead_head, ahead_block, ahead_own, ahead_length = request, head, block, own, length
        ahead_rows = _rows(pages, ahead_own, ahead_block, ahead_length, PAGE_ROWS)
        todo = end - begin
        for s in gl.static_range(_STAGES - 1):
            _issue(keys, values, k_pages, v_pages, ready, s, todo > s, ahead_head, ahead_rows)
            ahead_request, ahead_head, ahead_block, ahead_own, ahead_length = _before(
                lengths, indptr, ahead_request, ahead_head, ahead_block, ahead_own, ahead_length, KV_HEADS
            )
            ahead_rows = _rows(pages, ahead_own, ahead_block, ahead_length, PAGE_ROWS)
        rows = gl.arange(0, _ROWS, gl.SliceLayout(1, mma))
        keys_here = gl.expand_dims(gl.arange(0, _KEYS, gl.SliceLayout(0, mma)), 0)
        columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, mma)), 0)
        part_at = gl.expand_dims(rows, 1) * _DIM + columns
        q_rows = gl.expand_dims(gl.arange(0, _ROWS, gl.SliceLayout(1, left)), 1)
        q_columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, left)), 0)
        q_wanted = (q_rows < GROUP) & (q_columns >= 0)
        kept_rows = gl.expand_dims(gl.arange(0, _KEYS, gl.SliceLayout(1, whole)), 1)
        scale *= _LOG2_E
        turn = 0
        while end > begin:
            first = gl.maximum(start, begin)
            first_head = (request * KV_HEADS + head) * GROUP
            q_at = query + (first_head + q_rows) * _DIM + q_columns
            q0, q1 = gl.load(q_at, mask=q_wanted, other=0.0), gl.load(q_at + 64, mask=q_wanted, other=0.0)
            highest = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
            sum_ = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, mma))
            r0, r1 = gl.zeros([_ROWS, 64], gl.float32, mma), gl.zeros([_ROWS, 64], gl.float32, mma)
            for _ in range(first, end):
                ahead = turn + _STAGES - 1
                _issue(keys, values, k_pages, v_pages, ready, ahead % _STAGES, ahead < todo, ahead_head, ahead_rows)
                ahead_request, ahead_head, ahead_block, ahead_own, ahead_length = _before(
                    lengths, indptr, ahead_request, ahead_head, ahead_block, ahead_own, ahead_length, KV_HEADS
                )
                ahead_rows = _rows(pages, ahead_own, ahead_block, ahead_length, PAGE_ROWS)
                mbarrier.wait(ready.index(turn % _STAGES), turn // _STAGES & 1)
                at = turn % _STAGES * 2
                scores = gl.zeros([_ROWS, _KEYS], gl.float32, mma)
                scores = mma_v2(q0, k_ring.index(at).permute((1, 0)).load(right), scores)
                scores = mma_v2(q1, k_ring.index(at + 1).permute((1, 0)).load(right), scores)
                scores *= scale
                valid = length - block * _KEYS
                if valid < _KEYS:  # the rest was never written, and zero times NaN is NaN
                    scores = gl.where(keys_here < valid, scores, float("-inf"))
                    for half in gl.static_range(2):
                        kept = v_ring.index(at + half)
                        kept.store(gl.where(kept_rows < valid, kept.load(whole), 0.0))
                    fence_async_shared()
                above = gl.maximum(highest, gl.max(scores, 1))
                weights = gl.exp2(scores - gl.expand_dims(above, 1))
                fade = gl.exp2(highest - above)
                sum_ = sum_ * fade + gl.sum(weights, 1)
                highest = above
                fading = gl.expand_dims(fade, 1)
                given = gl.convert_layout(weights.to(dtype), left)
                r0 = mma_v2(given, v_ring.index(at).load(right), r0 * fading)
                r1 = mma_v2(given, v_ring.index(at + 1).load(right), r1 * fading)
                block -= 1
                turn += 1
            if end == start + count:
                for other in range(start // share, program):
                    while gl.atomic_add(flags + other, 0, sem="acquire") == 0:
                        pass
                    its = gl.load(sums + other * 2 * _ROWS + rows, cache_modifier=".cg")
                    its_sum = gl.load(sums + (other * 2 + 1) * _ROWS + rows, cache_modifier=".cg")
                    p0 = gl.load(part + other * _ROWS * _DIM + part_at, cache_modifier=".cg")
                    p1 = gl.load(part + other * _ROWS * _DIM + part_at + 64, cache_modifier=".cg")
                    above = gl.maximum(highest, its)
                    fade, rise = gl.exp2(highest - above), gl.exp2(its - above)
                    highest = above
                    sum_ = sum_ * fade + its_sum * rise
                    r0 = r0 * gl.expand_dims(fade, 1) + p0 * gl.expand_dims(rise, 1)
                    r1 = r1 * gl.expand_dims(fade, 1) + p1 * gl.expand_dims(rise, 1)
                    _together()
                    gl.atomic_xchg(flags + other, 0, sem="relaxed")
                out_at = out + first_head * _DIM + part_at
                wanted = gl.expand_dims(rows < GROUP, 1) & (columns >= 0)
                gl.store(out_at, (r0 / gl.expand_dims(sum_, 1)).to(dtype), mask=wanted)
                gl.store(out_at + 64, (r1 / gl.expand_dims(sum_, 1)).to(dtype), mask=wanted)
            else:
                gl.store(sums + program * 2 * _ROWS + rows, highest)
                gl.store(sums + (program * 2 + 1) * _ROWS + rows, sum_)
                gl.store(part + program * _ROWS * _DIM + part_at, r0)
                gl.store(part + program * _ROWS * _DIM + part_at + 64, r1)
                _together()
                gl.atomic_xchg(flags + program, 1, sem="release")
            end = first
            head -= 1
            if head < 0:
                head = head + KV_HEADS
                request = gl.maximum(request - 1, 0)
                length = gl.load(lengths + request)
                count = (length + _KEYS - 1) // _KEYS
            start -= count
            block = count - 1


def serves(query: Tensor, key_pages: Tensor) -> bool:
    """Whether it takes queries [B, H, D] and keys stored so, of layers without window, softcap and sinks, and is worth it."""
    batch, heads, dim = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    alike = query.dtype == key_pages.dtype and query.dtype in (torch.bfloat16, torch.float16)
    shaped = dim == _DIM.value and page_size == _PAGE.value and heads <= kv_heads * _ROWS.value
    placed = key_pages.stride()[1:] == (dim, page_size * dim, 1)  # a head's tokens side by side
    return batch >= _LEAST and kv_heads <= _MOST_HEADS and alike and shaped and placed and _is_able(query.device)


@cache
def _is_able(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def stream_decode(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    indptr: Tensor,
    pages: Tensor,
    lengths: Tensor,
    flags: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``reference.paged_attention`` with one query token for each request; does not wait for the device.

    Args:
        query: [B, H, D], contiguous; with ``key_pages`` one that it :func:`serves`.
        key_pages: [P, S, K, D].
        value_pages: The same, in the same order, for values.
        indptr: int32 [B + 1]: request i's pages begin at ``pages[indptr[i]]``.
        pages: int32, page ids.
        lengths: int32 [B]: keys of each request, at least 1.
        flags: int32, zeros, ``PROGRAMS`` for each multiprocessor; zeros again once it has ended. No two launches may share them
            at once.
        scale: Factor of the dot products.
        out: [B, H, D], contiguous: the result is written here; None: to a new tensor.

    Returns:
        [B, H, D].
    """
    batch, heads, dim = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    page_stride, programs = key_pages.stride(0), len(flags)
    out = torch.empty_like(query) if out is None else out
    part = torch.empty(programs, _ROWS.value * dim, dtype=torch.float32, device=query.device)
    sums = torch.empty(programs, 2 * _ROWS.value, dtype=torch.float32, device=query.device)
    rows = (len(key_pages) - 1) * page_stride // dim + kv_heads * page_size
    ring = gl.NVMMASharedLayout(128, 16, 2)
    k, v = (
        TensorDescriptor.from_tensor(each.as_strided((rows, dim), (dim, 1)), [page_size, 64], ring)
        for each in (key_pages, value_pages)
    )
    _stream_kernel[(programs,)](
        query, k, v, indptr, lengths, pages, part, sums, flags, out, scale, batch, GROUP=heads // kv_heads, KV_HEADS=kv_heads,
        PAGE_ROWS=page_stride // dim, BATCH=max(256, triton.next_power_of_2(batch)), num_warps=1,
    )  # fmt: skip
    return out
