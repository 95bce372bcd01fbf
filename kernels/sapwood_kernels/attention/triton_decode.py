"""Triton: attention of one new token for each request over the paged cache; the keys of a request are split over many programs.

Algorithm (Flash-Decoding; Dao et al., 2023): a program takes one request, one key/value head with all the query heads that share
it, and one of up to ``SPLITS`` stretches of the keys; it keeps a running maximum and sum (online softmax) and writes its part of
the result with the logarithm of its sum. A second kernel adds the parts, weighted by these sums. With few requests the splits
fill the chip; with many only long requests are split, so that none outlasts the others by much. This needs no plan on the host:
the kernel reads the lengths on the device. Where requests share keys, ``triton_shared`` reads these once for all of them; a
program here then takes what is a request's own, and the parts of both are added.

Keys and values in float8 are widened to float16, which holds each of their numbers; their scales go into the query and the
result. Instructions, not memory, are the limit there: on NVIDIA's GPUs four numbers are read as a word and widened two at a
time, where Triton by itself would move single bytes (20 instead of 36 instructions of a warp for a key and its value). Programs
have one warp or two, as they seldom wait for memory, and those of heads that share a row of memory run side by side.

Cost: one read of the keys and values; a request that is split also writes and reads stretches x H x D floats of partial results.
Bound: no stretch is longer than its share of the request's keys, rounded up to a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.attention.shared.triton_shared import attend_shared
from sapwood_kernels.attention.triton_block import LOG2_E, attend_block, window_code
from sapwood_kernels.attention.triton_parts import first_own_key, merge_parts, num_stretches

_LEAST_ROWS = 16  # the fewest rows of a matrix unit's product
_MOST_SPLITS = 32
_SPLITS_OF_LONG = 8
_SHORT, _LONG = 256, 512
_MANY, _MANY_FLOAT8 = 128, 1024
"""Requests times key/value heads above which stretches have at least 512 keys, not 256."""
_LARGE = 2048
"""Numbers of a program's result above which it has two warps."""


@triton.jit
def _widened(words, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """int32 [BLOCK, BLOCK_D / 4], each four float8_e4m3fn -> float16 [BLOCK, BLOCK_D]."""
    low, high = tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    first = low.to(tl.int16).to(tl.float16, bitcast=True)
    second = (low >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    third = high.to(tl.int16).to(tl.float16, bitcast=True)
    fourth = (high >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (BLOCK, BLOCK_D))


@triton.jit
def _block_of_words(
    q, keys, values, own, at, end, page_stride, slot_stride, highest, total, result, scale, cap,
    D: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Takes in a block of float8 keys and values as ``attend_block`` does, read in words of four; strides count words."""
    words = tl.arange(0, BLOCK_D // 4)
    # Beyond the end the last token is read again, which costs less than masks.
    tokens = tl.minimum(at + tl.arange(0, BLOCK), end - 1)
    page = tl.load(own + tokens // PAGE)
    places = (page * page_stride + tokens % PAGE * slot_stride)[:, None] + words[None, :]
    if BLOCK_D == D:
        k, v = tl.load(keys + places), tl.load(values + places)
    else:
        inside = (words < D // 4)[None, :]
        k, v = tl.load(keys + places, mask=inside, other=0), tl.load(values + places, mask=inside, other=0)
    scores = tl.dot(q, tl.trans(_widened(k, BLOCK, BLOCK_D))) * scale
    if CAPPED:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # tanh
    scores = tl.where((at + tl.arange(0, BLOCK) < end)[None, :], scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - above[:, None])
    fade = tl.exp2(highest - above)
    result = tl.dot(weights.to(tl.float16), _widened(v, BLOCK, BLOCK_D), result * fade[:, None])
    return above, total * fade + tl.sum(weights, axis=1), result


@triton.jit
def fetch_keys(
    pages_of_layer, own, at, end, page_stride, slot_stride, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Has the keys or values of a block come to the L2 cache; ``D`` counts numbers, or words where these are read."""
    line: tl.constexpr = 1024 // pages_of_layer.dtype.element_ty.primitive_bitwidth  # 128 bytes
    tokens = tl.minimum(at + tl.arange(0, BLOCK), end - 1)
    lines = tl.minimum(tl.arange(0, triton.next_power_of_2(triton.cdiv(D, line))) * line, D - 1)
    page = tl.load(own + tokens // PAGE).to(tl.int64)
    places = pages_of_layer + (page * page_stride + tokens % PAGE * slot_stride)[:, None] + lines[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize_on_alignment=["starts", "counts"])
def _split_kernel(
    query, keys, values, indptr, lengths, starts, counts, pages, sinks, part, sums, out, scale, value_scale, softcap, page_stride,
    slot_stride, head_stride,  # With WORDS, keys and values are float8 in words of four, and strides count words.
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, LEAST: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, FLOAT8: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    # Data from before the step, lengths and pages, is read while the kernel ahead runs.
    head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0) * GROUP
    length = tl.load(lengths + request)
    own = pages + tl.load(indptr + request)
    keys += head * head_stride
    values += head * head_stride
    start = first_own_key(length, starts, request, WINDOW, SHARED)
    count = num_stretches(length - start, LEAST, SPLITS)
    others = tl.load(counts + request) if SHARED else 0
    if split < count:
        share = tl.cdiv(tl.cdiv(length - start, count), BLOCK) * BLOCK
        at = start + split * share
        end = tl.minimum(at + share, length)
        if PDL:
            if at < end:
                words: tl.constexpr = D // 4 if WORDS else D
                fetch_keys(keys, own, at, end, page_stride, slot_stride, words, PAGE, BLOCK)
                fetch_keys(values, own, at, end, page_stride, slot_stride, words, PAGE, BLOCK)
            gdc_wait()
        rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        wanted = (rows < GROUP)[:, None] & (columns < D)[None, :]
        head_rows = request * heads + head * GROUP + rows
        q = tl.load(query + head_rows[:, None] * D + columns[None, :], mask=wanted, other=0.0)
        if FLOAT8:
            q = q.to(tl.float16)
        scale *= LOG2_E
        cap = softcap * LOG2_E
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if SINKS and split == 0:  # a key without a value, seen once
            highest = tl.load(sinks + head * GROUP + rows, mask=rows < GROUP, other=0.0) * LOG2_E
            total += 1.0
        result = tl.zeros((ROWS, BLOCK_D), tl.float32)
        if WORDS:
            for block in tl.range(at, end, BLOCK, num_stages=STAGES):
                highest, total, result = _block_of_words(
                    q, keys, values, own, block, end, page_stride, slot_stride, highest, total, result, scale, cap,
                    D, PAGE, CAPPED, BLOCK_D, BLOCK,
                )  # fmt: skip
        elif STAGES > 0:
            for block in tl.range(at, end, BLOCK, num_stages=STAGES):
                highest, total, result = attend_block(
                    q, keys, values, own, block, end, end, end, page_stride, slot_stride, highest, total, result, scale, cap,
                    D, PAGE, True, False, False, CAPPED, BLOCK_D, BLOCK,
                )  # fmt: skip
        else:  # Triton's interpreter cannot run such loops
            while at < end:
                highest, total, result = attend_block(
                    q, keys, values, own, at, end, end, end, page_stride, slot_stride, highest, total, result, scale, cap,
                    D, PAGE, True, False, False, CAPPED, BLOCK_D, BLOCK,
                )  # fmt: skip
                at += BLOCK
        empty = total == 0.0
        result = result / tl.where(empty, 1.0, total)[:, None] * value_scale
        if count + others == 1:
            tl.store(out + head_rows[:, None] * D + columns[None, :], result.to(out.dtype.element_ty), mask=wanted)
        else:
            slots = head_rows * SLOTS + split
            tl.store(part + slots[:, None] * D + columns[None, :], result, mask=wanted)
            tl.store(sums + slots, tl.where(empty, float("-inf"), highest + tl.log2(total)), mask=rows < GROUP)


@dataclass(frozen=True, slots=True)
class SharedWork:
    """The shared keys that ``triton_shared`` reads for several requests at once. On the device.

    Attributes:
        order, items, starts, counts: int32, as :class:`SharedRuns` and :class:`SharedItems` have them.
        slots: The most parts of a request's result that ``items`` leave.
    """

    order: Tensor
    items: Tensor
    starts: Tensor
    counts: Tensor
    slots: int


def num_splits(batch: int, kv_heads: int, processors: int, *, float8: bool = False) -> tuple[int, int]:
    """How many programs may share a request's keys, a power of 2, and the fewest keys that one of them takes.

    With few requests it is as many as fill the chip up to twice, with float8 four times, at most 32. With many it is stretches of
    at least 256 or 512 keys, which balances the processors: 32 to 256 requests of 100 to 1948 keys took an H200 up to a third
    longer whole, though as many of 1024 keys each take it a tenth less so.
    """
    most = (4 if float8 else 2) * processors // (batch * kv_heads)
    filling = min(_MOST_SPLITS, 1 << max(0, most.bit_length() - 1))
    if filling >= _SPLITS_OF_LONG:
        return filling, 1
    many = batch * kv_heads > (_MANY_FLOAT8 if float8 else _MANY)
    return _SPLITS_OF_LONG, _LONG if many else _SHORT


def takes_words(pages: Tensor) -> bool:
    """Whether float8 keys or values [P, S, K, D] can be read four at a time: the GPU can, and words' indices fit in 31 bits."""
    if not pages.is_cuda or torch.version.cuda is None or pages.shape[-1] % 4:
        return False
    return torch.cuda.get_device_capability(pages.device) >= (8, 9) and len(pages) * pages.stride(0) // 4 < 2**31


def decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    indptr: Tensor,
    pages: Tensor,
    lengths: Tensor,
    *,
    splits: int,
    scale: float,
    least: int = 1,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    shared: SharedWork | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``reference.paged_attention`` with one query token for each request; does not wait for the device.

    Args:
        query: [B, H, D], contiguous.
        key_pages: [P, S, K, D] in any order except that D is last, of the query's dtype or float8_e4m3fn.
        value_pages: The same, in the same order, for values.
        indptr: int32 [B + 1]: request i's pages begin at ``pages[indptr[i]]``.
        pages: int32, page ids.
        lengths: int32 [B]: keys of each request, at least 1.
        splits: Most programs for a request and key/value head, a power of 2, as :func:`num_splits` gives it.
        scale, window, chunked, softcap, sinks: As in ``reference.attention``.
        least: Fewest keys of a program, as :func:`num_splits` gives it.
        kv_scales: Factors of the stored keys and values.
        shared: The keys that several requests share and that are read once; None: each request reads all its keys.
        out: [B, H, D], contiguous: the result is written here; None: to a new tensor.

    Returns:
        [B, H, D].
    """
    batch, heads, dim = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    assert key_pages.stride() == value_pages.stride() and key_pages.stride(3) == 1, "keys and values lie differently"
    group = heads // kv_heads
    float8 = key_pages.dtype == torch.float8_e4m3fn
    slots = splits + (0 if shared is None else shared.slots)
    part = torch.empty((batch * heads, slots, dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((batch * heads, slots), dtype=torch.float32, device=query.device)
    starts, counts = (lengths, lengths) if shared is None else (shared.starts, shared.counts)
    if shared is not None:
        attend_shared(
            query, key_pages, value_pages, indptr, pages, lengths, shared.order, shared.items, part, sums, splits, scale=scale,
            window=window, chunked=chunked, softcap=softcap, kv_scales=kv_scales,
        )  # fmt: skip
    out = torch.empty_like(query) if out is None else out
    seen = window_code(window, chunked)
    block_d = max(16, triton.next_power_of_2(dim))
    words = float8 and takes_words(key_pages)
    rows = max(_LEAST_ROWS, triton.next_power_of_2(group))
    block, warps, stages = 64, 4, 3
    if least >= _SHORT and dim <= 128:  # where stretches are long
        block, warps, stages = (128, 2, 3) if float8 else (64, 2, 3)
    if words:
        block, warps, stages = (
            (64, 2, 5) if least >= _SHORT and dim <= 128 else (64, 1 if rows * block_d <= _LARGE else 2, 2)
        )
    if words:
        key_pages, value_pages = key_pages.view(torch.int32), value_pages.view(torch.int32)
    _split_kernel[(kv_heads, batch, splits)](
        query, key_pages, value_pages, indptr, lengths, starts, counts, pages, query if sinks is None else sinks, part, sums, out,
        scale * kv_scales[0], kv_scales[1], softcap or 1.0, *key_pages.stride()[:3],
        GROUP=group, D=dim, PAGE=page_size, SPLITS=splits, SLOTS=slots, LEAST=least, WINDOW=seen,
        CAPPED=softcap is not None, SINKS=sinks is not None, SHARED=shared is not None, FLOAT8=float8, WORDS=words, ROWS=rows,
        BLOCK_D=block_d, BLOCK=block,
        STAGES=stages if query.is_cuda else 0, num_warps=warps, **dependent_launch.options(query),
    )  # fmt: skip
    if slots > 1:
        merge_parts(
            part, sums, lengths, starts, counts, out, splits=splits, least=least, window=seen, shared=shared is not None
        )
    return out
