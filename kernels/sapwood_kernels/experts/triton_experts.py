"""Triton: the sum of each token's experts by two grouped products, which read an expert's matrices once for all its tokens.

Tokens are sorted by expert on the device, and each expert's are filled up to whole tiles, so that a program multiplies a tile of
one expert's tokens with a tile of its matrix. Shapes depend on the number of tokens only, never on what the router chose: all of
it can be captured in a CUDA graph. Bound: in small batches reading the matrices of the experts that are hit, in large ones the
products; a tile that is not full costs as much as a full one, so its height follows the tokens that an expert has on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.experts.stack import DenseStack


@triton.jit
def _product_kernel(
    x, weight, bias, out, places, experts, COUNT, N, EXPERTS, SHARE: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(experts + tile)
    if expert < EXPERTS:
        pair = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        valid = pair < COUNT
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < N
        # Offsets of 64 bits: all experts of a layer may have more than 2^31 numbers.
        matrix = weight + (expert.to(tl.int64) * N + columns.to(tl.int64)) * K
        row = x + (pair // SHARE).to(tl.int64) * K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            deep = at < K
            taken = tl.load(row[:, None] + at[None, :], mask=valid[:, None] & deep[None, :], other=0.0)
            part = tl.load(matrix[None, :] + at[:, None], mask=inside[None, :] & deep[:, None], other=0.0)
            total = tl.dot(taken, part, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert * N + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        target = out + pair.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs of a token and one of its experts, sorted by expert into tiles.

    Attributes:
        places: int64 [tiles * height]: the pair in each place, its token times k plus its number there; T * k where none is.
        experts: int64 [tiles]: each tile's expert; E or more for pairs whose expert is not here, and for tiles left over.
        height: Places of a tile.
    """

    places: Tensor
    experts: Tensor
    height: int


def align(ids: Tensor, experts: int, height: int) -> Tiles:
    """Sorts pairs into tiles.

    Args:
        ids: int64 [T, k]; E stands for an expert that is not here.
        experts: E.
        height: Places of a tile.
    """
    chosen = ids.flatten()
    count = len(chosen)
    tiles = (count + min(count, experts + 1) * (height - 1)) // height  # the most that any choice needs
    sizes = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    sizes.scatter_add_(0, chosen, torch.ones_like(chosen))
    filled = (sizes + height - 1) // height * height
    ends = filled.cumsum(0)
    order = chosen.argsort(stable=True)
    expert = chosen[order]
    nth = torch.arange(count, device=ids.device) - (sizes.cumsum(0) - sizes)[expert]
    places = torch.full((tiles * height,), count, dtype=torch.int64, device=ids.device)
    places[(ends - filled)[expert] + nth] = order
    starts = torch.arange(tiles, device=ids.device) * height
    return Tiles(places, torch.searchsorted(ends, starts, right=True), height)


def tile_height(pairs: int, experts: int) -> int:
    """Places of a tile, for so many pairs of tokens and experts: what an expert has on average, from 16 to 128."""
    return next((height for height in (16, 32, 64) if pairs <= height * experts), 128)


class TileShape(NamedTuple):
    """How a tile of the matrix is multiplied: its columns, how much of K at a time, warps and stages of the pipeline."""

    width: int
    depth: int
    warps: int
    stages: int


def tile_shape(height: int) -> TileShape:
    """What goes with tiles so high."""
    return TileShape(128 if height >= 64 else 64, 64, 8 if height == 128 else 4, 3)


def product(x: Tensor, stack: DenseStack, tiles: Tiles, pairs: int, share: int) -> Tensor:
    """``x[pair // share] @ weight.T + bias`` by each pair's expert: [*, K] -> [pairs, N], in x's dtype; 0 without an expert."""
    experts, outputs, inputs = stack.weight.shape
    out = torch.zeros(pairs, outputs, dtype=x.dtype, device=x.device)
    shape = tile_shape(tiles.height)
    _product_kernel[(len(tiles.experts), triton.cdiv(outputs, shape.width))](
        x, stack.weight, stack.weight if stack.bias is None else stack.bias, out, tiles.places, tiles.experts, pairs, outputs,
        experts, SHARE=share, K=inputs, HAS_BIAS=stack.bias is not None, BLOCK_M=tiles.height, BLOCK_N=shape.width,
        BLOCK_K=shape.depth, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def expert_sum(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: DenseStack,
    down: DenseStack,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Computes ``reference.expert_sum`` of at least one token; ``x`` is contiguous."""
    pairs, chosen = ids.numel(), ids.shape[1]
    tiles = align(ids, gate_up.experts, tile_height(pairs, gate_up.experts))
    inner = activate(product(x, gate_up, tiles, pairs, chosen))
    parts = product(inner, down, tiles, pairs, 1)
    return torch.bmm(weights.to(x.dtype).unsqueeze(1), parts.view(*ids.shape, down.outputs)).squeeze(1)
