"""Triton: the sum of each token's experts where experts are in float8 by blocks of 128 x 128 and inputs are rounded so, too.

A row of inputs has a scale for each 128 of them. What tensor cores make of 128 inputs is multiplied by both scales and added up
in float32: such checkpoints are made for that (DeepSeek-V3, 2024, section 3.3.2), and a Hopper's sums of float8 products, which
keep 14 bits, are over 128 numbers only. Nothing is widened: codes go from memory to tensor cores.

Bound: as ``triton_experts``, with half of bfloat16's bytes and twice its products a second.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.experts.stack import DenseStack, StoredStack
from sapwood_kernels.experts.tiles.plan import TileShape
from sapwood_kernels.experts.tiles.triton_align import Tiles
from sapwood_kernels.experts.triton_gate import Gate, gated, kind_of
from sapwood_kernels.quantised.grouped import BLOCK

Float8 = tuple[Tensor, Tensor]
"""Rows of float8_e4m3fn, [T, K], and their scales, float32 [T, K / 128]; those of a group lie next to each other."""


@triton.jit(do_not_specialize=["COUNT"])
def _blocks_kernel(
    x, x_scales, weight, scales, out, places, experts, COUNT, N, EXPERTS, STRIDE, SHARE: tl.constexpr, K: tl.constexpr,
    GATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Programs that run at the same time share an expert's tokens and matrix, which the L2 cache then holds.
    blocks = tl.cdiv(N, BLOCK_N)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(experts + tile)
    if expert < EXPERTS:
        pair = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        valid = pair < COUNT
        nth = tl.arange(0, BLOCK_N)
        first = block * BLOCK_N
        columns = first + nth
        if GATE >= 0:  # 8 gates and their 8 gated values alternate: a tensor core's thread has both
            first = block * (BLOCK_N // 2)
            columns = first + nth // 16 * 8 + nth % 8 + nth % 16 // 8 * (N // 2)
        groups: tl.constexpr = K // BLOCK
        at = tl.arange(0, BLOCK)
        inside = columns < N
        # Offsets of 64 bits: all experts of a layer may have more than 2^31 numbers.
        matrix = weight + (expert.to(tl.int64) * N + columns.to(tl.int64))[:, None] * K + at[None, :]
        row = x + (pair // SHARE).to(tl.int64)[:, None] * K + at[None, :]
        of_block = scales + (expert.to(tl.int64) * (N // BLOCK) + first // BLOCK) * groups
        of_row = x_scales + pair // SHARE
        own = tl.load(of_row, mask=valid, other=0.0)
        # Few tokens are the right side: the matrix, as the left one, fills a tensor core.
        few: tl.constexpr = BLOCK_M < 128
        total = tl.zeros((BLOCK_N, BLOCK_M) if few else (BLOCK_M, BLOCK_N), tl.float32)
        for group in range(groups):
            taken = tl.load(row + group * BLOCK, mask=valid[:, None], other=0.0)
            part = tl.load(
                matrix + group * BLOCK, mask=inside[:, None], other=0.0, eviction_policy="evict_first" if few else ""
            )
            scale = tl.zeros((BLOCK_N,), tl.float32) + tl.load(of_block + group)
            if GATE >= 0:
                scale = tl.where(nth % 16 < 8, scale, tl.load(of_block + N // 2 // BLOCK * groups + group))
            mine = own  # the next ones are under way meanwhile
            own = tl.load(of_row + (group + 1) * STRIDE, mask=valid & (group + 1 < groups), other=0.0)
            if few:
                product = tl.dot(part, tl.trans(taken), out_dtype=tl.float32)
                total += product * (scale[:, None] * mine[None, :])
            else:
                product = tl.dot(taken, tl.trans(part), out_dtype=tl.float32)
                total += product * (mine[:, None] * scale[None, :])
        if not few:
            total = tl.trans(total)
        if GATE >= 0:
            both = tl.permute(tl.reshape(total, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
            gate, up = tl.split(both)
            result = tl.reshape(gated(gate, up, 0.0, 0.0, GATE), (BLOCK_N // 2, BLOCK_M))
            active = first + tl.arange(0, BLOCK_N // 2)
            target = out + pair.to(tl.int64)[None, :] * (N // 2) + active[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=valid[None, :] & (active < N // 2)[:, None])
        else:
            target = out + pair.to(tl.int64)[None, :] * N + columns[:, None]
            tl.store(target, total.to(out.dtype.element_ty), mask=valid[None, :] & inside[:, None])


def serves(stack: DenseStack | StoredStack, gate: Gate | None = None) -> TypeGuard[StoredStack]:
    """Whether the inputs of these matrices may be rounded so: gates and ups are whole blocks each."""
    if not isinstance(stack, StoredStack) or stack.rounds != "block" or stack.bias is not None:
        return False
    parts = 1 if gate is None else 2
    return stack.outputs % (parts * BLOCK) == stack.columns % BLOCK == 0


def product(
    x: Float8,
    stack: StoredStack,
    tiles: Tiles,
    pairs: int,
    share: int,
    shape: TileShape,
    dtype: torch.dtype,
    gate: Gate | None = None,
) -> Tensor:
    """``x[pair // share] @ weight.T`` by each pair's expert, gated if there is a gate, as ``triton_experts.product``.

    Args:
        x: Rows, rounded as ``triton_float8.quantise`` does it by groups.
        stack: The matrices, such as are served (:func:`serves`).
        tiles: The pairs in tiles.
        pairs: How many there are.
        share: Pairs of a row of x.
        shape: A tile's, whose depth is not asked for: it is that of a block.
        dtype: The result's.
        gate: The activation.
    """
    codes, x_scales = x
    kind = -1 if gate is None else kind_of(gate)[0]
    width = min(shape.width, BLOCK if gate is None else 2 * BLOCK)  # of a tile's matrix, or either half, one block
    out = torch.empty(pairs, stack.outputs if gate is None else stack.outputs // 2, dtype=dtype, device=codes.device)
    _blocks_kernel[(len(tiles.experts) * triton.cdiv(stack.outputs, width),)](
        codes, x_scales, stack.codes, stack.scales, out, tiles.places, tiles.experts, pairs, stack.outputs, stack.experts,
        x_scales.stride(1), SHARE=share, K=codes.shape[1], GATE=kind, BLOCK=BLOCK,
        BLOCK_M=tiles.height, BLOCK_N=width, num_warps=shape.warps, num_stages=shape.stages,
        **dependent_launch.options(tiles.ids, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return out
