"""Triton: sorts tokens by expert into whole tiles, in one launch, or in three.

A program for each expert counts all pairs of a token and an expert, so that it knows where its tiles begin, and then writes its
own pairs there in order. Reading all pairs for each expert costs less than the launches of a sort: 256 tokens have 8 KB of them.
More than 4096 pairs are counted by a launch of its own, so that several programs can share one expert's pairs.
Shapes depend on the number of pairs only, and nothing waits for the host: it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch

_BLOCK = 4096
LEAST = _BLOCK + 1
"""Number of pairs from which a table says where each of them is."""
_LEAST_BINS = 128
"""The fewest bins of a histogram: one for each thread of a program."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs of a token and one of its experts, sorted by expert into tiles.

    Attributes:
        places: int32 [tiles * height]: the pair in each place, its token times k plus its number there; T * k where none is.
            Undefined in tiles without an expert.
        experts: int32 [tiles]: each tile's expert; E for tiles left over. Pairs whose expert is not here have no place.
        height: Places of a tile.
        ids: What was sorted, [T, k].
        where: int32 [T * k]: each pair's place, of ``LEAST`` pairs or more; undefined of those that have none.
    """

    places: Tensor
    experts: Tensor
    height: int
    ids: Tensor
    where: Tensor | None = None


@triton.jit
def _align_kernel(
    ids, places, experts, COUNT, TILES, EXPERTS, HEIGHT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    sizes = tl.zeros((BINS,), tl.int32)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + at, mask=at < COUNT, other=EXPERTS).to(tl.int32)
        sizes += tl.histogram(chosen, BINS)
    sizes = tl.where(bins < EXPERTS, sizes, 0)
    first = tl.sum(tl.where(bins < own, (sizes + HEIGHT - 1) // HEIGHT, 0))
    size = tl.sum(tl.where(bins == own, sizes, 0))
    # The program after the last expert's marks the tiles that are left over.
    end = tl.where(own == EXPERTS, TILES, first + (size + HEIGHT - 1) // HEIGHT)
    for start in range(first, end, BINS):
        tl.store(experts + start + bins, own + tl.zeros((BINS,), tl.int32), mask=start + bins < end)
    if size > 0:
        nth = size + tl.arange(0, HEIGHT)
        tl.store(
            places + first * HEIGHT + nth,
            COUNT + tl.zeros((HEIGHT,), tl.int32),
            mask=first * HEIGHT + nth < end * HEIGHT,
        )
        done = 0
        for start in range(0, COUNT, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mine = (tl.load(ids + at, mask=at < COUNT, other=EXPERTS).to(tl.int32) == own).to(tl.int32)
            tl.store(places + first * HEIGHT + done + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
            done += tl.sum(mine)


@triton.jit
def _count_pairs_kernel(ids, counts, COUNT, EXPERTS, BINS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + at, mask=at < COUNT, other=EXPERTS).to(tl.int32)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(chosen, BINS))


@triton.jit
def _begins_kernel(
    counts, begins, places, experts, COUNT, TILES, EXPERTS, PARTS, HEIGHT: tl.constexpr, BINS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    bins, parts = tl.arange(0, BINS), tl.arange(0, BLOCK_PARTS)
    sizes = tl.load(counts + parts[:, None] * BINS + bins[None, :], mask=(parts < PARTS)[:, None], other=0)
    sizes = tl.where((bins < EXPERTS)[None, :], sizes, 0)
    first = tl.sum(tl.where(bins < own, (tl.sum(sizes, axis=0) + HEIGHT - 1) // HEIGHT, 0))
    mine = tl.sum(tl.where(bins[None, :] == own, sizes, 0), axis=1)
    size = tl.sum(mine)
    tl.store(begins + own * PARTS + parts, first * HEIGHT + tl.cumsum(mine, 0) - mine, mask=parts < PARTS)
    end = tl.where(own == EXPERTS, TILES, first + (size + HEIGHT - 1) // HEIGHT)
    for start in range(first, end, BINS):
        tl.store(experts + start + bins, own + tl.zeros((BINS,), tl.int32), mask=start + bins < end)
    nth = first * HEIGHT + size + tl.arange(0, HEIGHT)
    left = tl.where(size > 0, end * HEIGHT, 0)
    tl.store(places + nth, COUNT + tl.zeros((HEIGHT,), tl.int32), mask=nth < left)


@triton.jit
def _place_pairs_kernel(ids, begins, places, where, COUNT, PARTS, BLOCK: tl.constexpr):
    own, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    mine = (tl.load(ids + at, mask=at < COUNT, other=-1).to(tl.int32) == own).to(tl.int32)
    place = tl.load(begins + own * PARTS + part) + tl.cumsum(mine, 0) - 1
    tl.store(places + place, at, mask=mine > 0)
    tl.store(where + at, place, mask=mine > 0)


def _align_many(ids: Tensor, places: Tensor, of_tiles: Tensor, experts: int, height: int, bins: int) -> Tensor:
    """Counts parts of the pairs, tells where each part's begin, and places them; returns each pair's place."""
    count = ids.numel()
    parts = triton.cdiv(count, _BLOCK)
    counts = torch.empty(parts, bins, dtype=torch.int32, device=ids.device)
    begins = torch.empty(experts + 1, parts, dtype=torch.int32, device=ids.device)
    where = torch.empty(count, dtype=torch.int32, device=ids.device)
    _count_pairs_kernel[(parts,)](ids, counts, count, experts, BINS=bins, BLOCK=_BLOCK, num_warps=8)
    _begins_kernel[(experts + 1,)](
        counts, begins, places, of_tiles, count, len(of_tiles), experts, parts, HEIGHT=height, BINS=bins,
        BLOCK_PARTS=triton.next_power_of_2(parts), num_warps=4,
    )  # fmt: skip
    _place_pairs_kernel[(experts, parts)](ids, begins, places, where, count, parts, BLOCK=_BLOCK, num_warps=8)
    return where


def align(ids: Tensor, experts: int, height: int) -> Tiles:
    """Sorts pairs into tiles.

    Args:
        ids: Integers [T, k], contiguous; E stands for an expert that is not here.
        experts: E.
        height: Places of a tile, a power of 2.
    """
    count = ids.numel()
    tiles = (count + min(count, experts) * (height - 1)) // height  # the most that any choice needs
    places = torch.empty(tiles * height, dtype=torch.int32, device=ids.device)
    of_tiles = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    bins = max(_LEAST_BINS, triton.next_power_of_2(experts + 1))
    if count > _BLOCK:
        return Tiles(places, of_tiles, height, ids, _align_many(ids, places, of_tiles, experts, height, bins))
    _align_kernel[(experts + 1,)](
        ids, places, of_tiles, count, tiles, experts, HEIGHT=height, BINS=bins,
        BLOCK=min(_BLOCK, max(_LEAST_BINS, triton.next_power_of_2(count))), num_warps=4 if count <= 1024 else 8,
        **dependent_launch.options(ids, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return Tiles(places, of_tiles, height, ids)
