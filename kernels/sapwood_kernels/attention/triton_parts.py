"""Triton: into how many parts the keys of a request are split, and how the parts of its result are added."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.attention.triton_block import oldest_seen

_MOST_OF_WARP = 4096
"""Numbers that a warp's registers hold. 32 parts of 512 took one, which spilled, 6 us more than they take eight on an H200."""


@triton.jit
def num_stretches(length, LEAST: tl.constexpr, SPLITS: tl.constexpr):
    """The number of stretches into which ``length`` keys are split."""
    return tl.minimum(tl.maximum(length // LEAST, 1), SPLITS)


@triton.jit
def first_own_key(length, starts, request, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """The first key that a request reads by itself."""
    start = oldest_seen(length - 1, WINDOW) if WINDOW != 0 else 0
    return tl.maximum(start, tl.load(starts + request)) if SHARED else start


@triton.jit(do_not_specialize_on_alignment=["starts", "counts"])
def _merge_kernel(
    part, sums, lengths, starts, counts, out, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    LEAST: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Adds a row's parts, weighted by their sums: the first of ``SPLITS`` slots its own, those after them of shared runs."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    request = row // HEADS
    length = tl.load(lengths + request)
    own = num_stretches(length - first_own_key(length, starts, request, WINDOW, SHARED), LEAST, SPLITS)
    others = tl.load(counts + request) if SHARED else 0
    if PDL:
        gdc_wait()
    if own + others > 1:
        slots, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        there = slots < own
        if SHARED:
            there = there | ((slots >= SPLITS) & (slots < SPLITS + others))
        logs = tl.load(sums + row * SLOTS + slots, mask=there, other=float("-inf"))
        inside = there[:, None] & (columns < D)[None, :]
        parts = tl.load(part + (row * SLOTS + slots)[:, None] * D + columns[None, :], mask=inside, other=0.0)
        weights = tl.exp2(logs - tl.max(logs, axis=0))
        weights /= tl.sum(weights, axis=0)
        result = tl.sum(parts * weights[:, None], axis=0)
        tl.store(out + row * D + columns, result.to(out.dtype.element_ty), mask=columns < D)


def merge_parts(
    part: Tensor,
    sums: Tensor,
    lengths: Tensor,
    starts: Tensor,
    counts: Tensor,
    out: Tensor,
    *,
    splits: int,
    least: int,
    window: int = 0,
    shared: bool,
) -> None:
    """Adds the parts of each row of ``out`` [B, H, D], contiguous, that has more than one; does not wait for the device.

    Args:
        part: float32 [B * H, S, D].
        sums: float32 [B * H, S]: the logarithms, to base 2, of the sums of weights.
        lengths: int32 [B]: keys of each request.
        starts, counts: int32 [B], as ``SharedWork`` has them; not read unless ``shared``.
        out: The result.
        splits, least: Most programs of a request and fewest keys of one, which decide how many parts there are.
        window: As ``window_code`` gives it.
        shared: Whether slots from ``splits`` on hold parts of shared runs.
    """
    heads, dim = out.shape[1:]
    slots = part.shape[1]
    block, block_d = triton.next_power_of_2(slots), max(16, triton.next_power_of_2(dim))
    _merge_kernel[(len(part),)](
        part, sums, lengths, starts, counts, out, HEADS=heads, D=dim, SPLITS=splits, SLOTS=slots, LEAST=least, WINDOW=window,
        SHARED=shared, BLOCK_D=block_d, BLOCK=block, num_warps=merge_warps(block * block_d), **dependent_launch.options(out),
    )  # fmt: skip


def merge_warps(numbers: int) -> int:
    """Warps of a program that adds this many numbers: one, unless its registers cannot hold them, as more wait for one
    another."""
    return 1 if numbers <= _MOST_OF_WARP else 8
