"""Triton: into how many parts the keys of a request are split, and how the parts of its result are added."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels.attention.triton_block import oldest_seen


@triton.jit
def num_stretches(length, LEAST: tl.constexpr, SPLITS: tl.constexpr):
    """The number of stretches into which ``length`` keys are split."""
    return tl.minimum(tl.maximum(length // LEAST, 1), SPLITS)


@triton.jit
def first_own_key(length, starts, request, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """The first key that a request reads by itself."""
    start = oldest_seen(length - 1, WINDOW) if WINDOW != 0 else 0
    return tl.maximum(start, tl.load(starts + request)) if SHARED else start


@triton.jit
def _merge_kernel(
    part, sums, lengths, starts, counts, out, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    LEAST: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Adds a row's parts, weighted by their sums: the first of ``SPLITS`` slots its own, those after them of shared runs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    request = row // HEADS
    length = tl.load(lengths + request)
    own = num_stretches(length - first_own_key(length, starts, request, WINDOW, SHARED), LEAST, SPLITS)
    others = tl.load(counts + request) if SHARED else 0
    if own + others > 1:
        slots, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        there = slots < own
        if SHARED:
            there = there | ((slots >= SPLITS) & (slots < SPLITS + others))
        logs = tl.load(sums + row * SLOTS + slots, mask=there, other=float("-inf"))
        weights = tl.exp2(logs - tl.max(logs, axis=0))
        weights /= tl.sum(weights, axis=0)
        inside = there[:, None] & (columns < D)[None, :]
        parts = tl.load(part + (row * SLOTS + slots)[:, None] * D + columns[None, :], mask=inside, other=0.0)
        result = tl.sum(parts * weights[:, None], axis=0)
        tl.store(out + row * D + columns, result.to(out.dtype.element_ty), mask=columns < D)
