"""Triton: the parts of latent attention's (MLA) result, of few tokens, added and expanded to the heads' values in one launch.

A program has a part of a head's matrix, which it begins to read before the kernel ahead has ended, and a token, whose parts it
adds for itself: they are read as often as the head's values have programs, from the L2 cache. Bound: one read of the matrices,
and of the parts by each program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.attention.triton_parts import first_own_key, num_stretches

MOST = 128
"""Rows, tokens times heads, up to which it is used: each of a row's programs adds its parts."""
WARPS = 8


def numbers_of(rows: int) -> int:
    """Of a program's values: 128 programs and more for heads of 128 numbers."""
    return 16 if rows <= 32 else 32 if rows <= 64 else 64


@triton.jit
def keys_of_stretch(length, count, KEYS: tl.constexpr):
    """Keys of each of ``count`` stretches of ``length`` keys but for the last ones: whole blocks of ``KEYS``."""
    return tl.cdiv(tl.cdiv(length, count), KEYS) * KEYS


@triton.jit(do_not_specialize_on_alignment=["starts", "counts"])
def _merge_values_kernel(
    part, sums, lengths, starts, counts, up, out, HEADS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    SPLITS: tl.constexpr, SLOTS: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    request, head = tl.program_id(0), tl.program_id(2)
    value, latent = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    inside = (value < V)[:, None] & (latent < R)[None, :]
    matrix = tl.load(up + (head * (N + V) + N + value[:, None]) * R + latent[None, :], mask=inside, other=0.0)
    length = tl.load(lengths + request)
    length -= first_own_key(length, starts, request, 0, SHARED)
    # Those that begin before the end: the others have written nothing.
    own = tl.cdiv(length, keys_of_stretch(length, num_stretches(length, LEAST, SPLITS), KEYS))
    others = tl.load(counts + request) if SHARED else 0
    if PDL:
        gdc_wait()
    row, slots = request * HEADS + head, tl.arange(0, BLOCK)
    there = slots < own
    if SHARED:
        there = there | ((slots >= SPLITS) & (slots < SPLITS + others))
    logs = tl.load(sums + row * SLOTS + slots, mask=there, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, axis=0))
    weights /= tl.sum(weights, axis=0)
    parts = tl.load(
        part + (row * SLOTS + slots[:, None]) * R + latent[None, :], mask=there[:, None] & (latent < R)[None, :], other=0.0
    )  # fmt: skip
    summed = tl.sum(parts * weights[:, None], axis=0)
    result = tl.sum(matrix.to(tl.float32) * summed[None, :], axis=1)
    tl.store(out + row * V + value, result.to(out.dtype.element_ty), mask=value < V)


def merge_values(
    part: Tensor,
    sums: Tensor,
    lengths: Tensor,
    starts: Tensor,
    counts: Tensor,
    up: Tensor,
    nope: int,
    *,
    splits: int,
    least: int,
    keys: int,
    shared: bool,
    dtype: torch.dtype,
) -> Tensor:
    """``LatentHeads.values`` of the sum of parts; does not wait for the device.

    Args:
        part, sums, lengths, starts, counts: As ``triton_parts.merge_parts`` takes them, but that each row has parts.
        splits, least, shared: Likewise.
        up: [H, N + V, R], contiguous.
        nope: N.
        keys: Keys of a block, in which stretches are counted.
        dtype: The result's dtype.

    Returns:
        [B, H, V].
    """
    batch, (heads, both, rank), slots = len(lengths), up.shape, part.shape[1]
    value = both - nope
    out = torch.empty(batch, heads, value, dtype=dtype, device=up.device)
    numbers = numbers_of(batch * heads)
    _merge_values_kernel[(batch, triton.cdiv(value, numbers), heads)](
        part, sums, lengths, starts, counts, up, out, HEADS=heads, N=nope, V=value, R=rank, SPLITS=splits, SLOTS=slots,
        LEAST=least, KEYS=keys, SHARED=shared, BLOCK=triton.next_power_of_2(slots), BLOCK_V=numbers,
        BLOCK_R=triton.next_power_of_2(rank), num_warps=WARPS, **dependent_launch.options(out),
    )  # fmt: skip
    return out
