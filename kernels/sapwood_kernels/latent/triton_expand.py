"""Triton: keys of latent attention's (MLA) heads out of their two parts, and values as wide as keys where that is wanted.

The product that expands cached vectors leaves each head's key, without its rotary end, and its value side by side. A program
takes some heads of a token: it puts the end that all heads share behind each key. Values are left where they are, unless who
takes them wants heads of one size. Bound: reads the keys' parts once and writes keys once; with wide values those as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
"""Heads of a program, at most."""


@triton.jit(do_not_specialize_on_alignment=["end_stride"])
def _join_kernel(
    both, ends, keys, values, end_stride, HEADS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, E: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    there = heads < HEADS
    source = both + (token * HEADS + heads) * (N + V)
    target = keys + (token * HEADS + heads) * (N + E)
    flat, end = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_E)[None, :]
    tl.store(target + flat, tl.load(source + flat, mask=there & (flat < N), other=0.0), mask=there & (flat < N))
    shared = tl.load(ends + token * end_stride + end, mask=end < E, other=0.0)
    tl.store(target + N + end, shared, mask=there & (end < E))
    if WIDE:
        column = tl.arange(0, BLOCK_V)[None, :]
        value = tl.load(source + N + column, mask=there & (column < V), other=0.0)
        tl.store(values + (token * HEADS + heads) * (N + E) + column, value, mask=there & (column < N + E))


def expand(stored: Tensor, heads: slice, wide: bool, *, up: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Computes ``LatentHeads.expand``.

    Args:
        stored: [M, R + E], rows contiguous.
        heads: Which.
        wide: Whether values are to be filled up with zeros to N + E numbers; V is not more then.
        up: [H, N + V, R], contiguous.
        nope: N.

    Returns:
        Keys [M, h, N + E], contiguous, and values [M, h, V], a view, or [M, h, N + E].
    """
    up = up[heads]
    count, outputs, rank = up.shape
    both = (stored[:, :rank] @ up.flatten(0, 1).t()).view(len(stored), count, outputs)
    ends = stored.shape[1] - rank
    value_dim, dim = outputs - nope, nope + ends
    keys = torch.empty(len(stored), count, dim, dtype=stored.dtype, device=stored.device)
    values = torch.empty_like(keys) if wide else both[..., nope:]
    block = min(_HEADS, triton.next_power_of_2(count))
    _join_kernel[(len(stored), triton.cdiv(count, block))](
        both, stored[:, rank:], keys, values, stored.stride(0), HEADS=count, N=nope, V=value_dim, E=ends, WIDE=wide,
        BLOCK_N=triton.next_power_of_2(nope), BLOCK_E=triton.next_power_of_2(ends), BLOCK_V=triton.next_power_of_2(dim),
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return keys, values
