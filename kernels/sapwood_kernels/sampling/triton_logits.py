"""Triton: operations on whole rows of logits, besides sampling: the likeliest token, penalties, forbidden tokens.

Each is one pass. Bounds: :func:`row_max` reads the logits once in their dtype; :func:`apply_penalties` reads and writes them and
reads five bytes of counts for each token; :func:`apply_token_bitmask` reads the masks and writes the forbidden logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch

_BLOCK = 4096


@triton.jit
def _part_max_kernel(
    logits, maxima, places, stride, V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, axis=0)
    broken = tl.max((values != values).to(tl.int32), axis=0) > 0
    place = tl.min(tl.where(values == largest, at, V - 1), axis=0)
    tl.store(maxima + row * PARTS + part, tl.where(broken, float("nan"), largest))
    tl.store(places + row * PARTS + part, place)


@triton.jit
def _row_max_kernel(maxima, places, largest, greedy, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    parts = tl.load(maxima + row * PARTS + at, mask=at < PARTS, other=float("-inf"))
    found = tl.load(places + row * PARTS + at, mask=at < PARTS, other=2147483647)
    most = tl.max(parts, axis=0)
    broken = tl.max((parts != parts).to(tl.int32), axis=0) > 0
    place = tl.min(tl.where((parts == most) | broken, found, 2147483647), axis=0)
    tl.store(largest + row, tl.where(broken, float("nan"), most))
    hopeless = broken | (tl.abs(most) == float("inf"))
    tl.store(greedy + row, tl.where(hopeless, -1, place).to(tl.int64))


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum, float32 [R], NaN where the row holds one, and its first place, int64 [R], -1 where it is not finite.

    Args:
        logits: [R, V] of any float dtype, rows contiguous.
    """
    rows, width = logits.shape
    parts = triton.cdiv(width, _BLOCK)
    maxima = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    greedy = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _part_max_kernel[(rows, parts)](
        logits, maxima, places, logits.stride(0), V=width, PARTS=parts, BLOCK=block, num_warps=8,
        **dependent_launch.options(logits),
    )  # fmt: skip
    _row_max_kernel[(rows,)](
        maxima, places, largest, greedy, PARTS=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1,
        **dependent_launch.options(logits),
    )  # fmt: skip
    return largest, greedy


@triton.jit
def _penalty_kernel(
    logits, counts, seen, rows, slots, frequency, presence, repetition, stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0)
    setting = index * stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    target = logits + tl.load(rows + index) * V + at
    source = tl.load(slots + index) * V + at
    values = tl.load(target, mask=inside, other=0.0)
    count = tl.load(counts + source, mask=inside, other=0)
    known = tl.load(seen + source, mask=inside, other=0)
    factor = tl.load(repetition + setting)
    values = tl.where(known != 0, tl.where(values > 0, values / factor, values * factor), values)
    values -= tl.load(frequency + setting) * count.to(tl.float32)
    values -= tl.where(count > 0, tl.load(presence + setting), 0.0)
    tl.store(target, values, mask=inside)


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    seen: Tensor,
    rows: Tensor,
    slots: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> None:
    """Computes ``reference.apply_penalties``. ``logits``, ``counts`` and ``seen`` are contiguous; penalties share a stride."""
    width = logits.shape[1]
    stride = frequency.stride(0)
    assert stride == presence.stride(0) == repetition.stride(0), "the penalties lie differently"
    block = min(_BLOCK, triton.next_power_of_2(width))
    _penalty_kernel[(len(rows), triton.cdiv(width, block))](
        logits, counts, seen.view(torch.uint8), rows, slots, frequency, presence, repetition, stride, V=width, BLOCK=block,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _count_kernel(counts, seen, tokens, rows, slots, count, V: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    token = tl.load(tokens + row, mask=inside, other=-1)
    inside = token >= 0
    place = tl.load(slots + at, mask=inside, other=0) * V + token
    tl.store(counts + place, tl.load(counts + place, mask=inside, other=0) + 1, mask=inside)
    tl.store(seen + place, tl.full((BLOCK,), 1, tl.uint8), mask=inside)


def count_tokens(counts: Tensor, seen: Tensor, tokens: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Computes ``reference.count_tokens``; ``counts`` and ``seen`` are contiguous."""
    block = 128
    _count_kernel[(triton.cdiv(len(rows), block),)](
        counts, seen.view(torch.uint8), tokens, rows, slots, len(rows), V=counts.shape[1], BLOCK=block, num_warps=4
    )  # fmt: skip


@triton.jit
def _bitmask_kernel(
    logits, bitmask, rows, stride, V: tl.constexpr, WORDS: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = index
    if HAS_ROWS:
        row = tl.load(rows + index)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmask + index * WORDS + at // 32, mask=at // 32 < WORDS, other=0)
    forbidden = ((words >> (at % 32)) & 1) == 0
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * stride + at, nothing, mask=forbidden & (at < V))


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """Computes ``token_bitmask.apply_token_bitmask``; rows of ``logits``, and the whole ``bitmask``, are contiguous."""
    masks, words = bitmask.shape
    width = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(width))
    _bitmask_kernel[(masks, triton.cdiv(width, block))](
        logits, bitmask, bitmask if rows is None else rows, logits.stride(0), V=width, WORDS=words,
        HAS_ROWS=rows is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
