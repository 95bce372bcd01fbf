"""Triton: the sum of each token's experts by two grouped products, which read an expert's matrices once for all its tokens.

Tokens are sorted by expert on the device (``tiles``), and each expert's are filled up to whole tiles, so that a program
multiplies a tile of one expert's tokens with a tile of its matrix. Shapes depend on the number of tokens only, never on what the
router chose: all of it can be captured in a CUDA graph. Matrices in few bits are widened in registers. Bound: in small batches
reading the matrices of the experts that are hit, in large ones the products; a tile that is not full costs as much as a full one,
so its height follows the tokens that an expert has on average. Few tokens are not sorted (``triton_few_tokens.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch, triton_float8
from sapwood_kernels.experts import triton_few_tokens, triton_float8_blocks
from sapwood_kernels.experts.stack import DenseStack, StoredStack, in_few_bits
from sapwood_kernels.experts.tiles.plan import TilePlan, TileShape, TileTable
from sapwood_kernels.experts.tiles.triton_align import Tiles, align
from sapwood_kernels.experts.triton_gate import Gate, gated, kind_of
from sapwood_kernels.experts.triton_widen import arguments, widened
from sapwood_kernels.quantised import triton_int8

_SUM_BLOCK = 512
_ROUNDED = 64
"""Places of a tile from which inputs are rounded to 8 bits where they may be; with fewer, reading matrices takes longer."""


@triton.jit(do_not_specialize=["COUNT"])
def _product_kernel(
    x, x_scales, weight, scales, zeros, mins, table, factors, orders, bias, out, places, experts, alpha, limit, COUNT, N, EXPERTS,
    SHARE: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr, BITS: tl.constexpr,
    INTEGERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
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
        columns = block * BLOCK_N + nth
        inside = columns < N
        if GATE >= 0:  # 8 gates and their 8 gated values alternate: a tensor core's thread has both
            active = block * (BLOCK_N // 2) + nth // 16 * 8 + nth % 8
            inside = active < N // 2
            columns = 2 * active + nth % 16 // 8 if GATE == 2 else active + nth % 16 // 8 * (N // 2)
        # Offsets of 64 bits: all experts of a layer may have more than 2^31 numbers.
        matrix = weight + (expert.to(tl.int64) * N + columns.to(tl.int64)) * K
        row = x + (pair // SHARE).to(tl.int64) * K
        # Few tokens are the right side: the matrix, as the left one, fills a tensor core.
        few: tl.constexpr = BLOCK_M < 128
        # Sums of int8 numbers are exact.
        sums: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
        total = tl.zeros((BLOCK_N, BLOCK_M) if few else (BLOCK_M, BLOCK_N), sums)
        for start in range(0, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            deep = at < K
            place = at
            if orders is not None:
                place = tl.load(orders + expert.to(tl.int64) * K + at, mask=deep, other=0)
            taken = tl.load(row[:, None] + place[None, :], mask=valid[:, None] & deep[None, :], other=0.0)
            if GROUP > 0 and x_scales is None:
                part = widened(
                    weight, scales, zeros, mins, table, expert, columns, inside, start, N, K, GROUP, TALL, BITS, INTEGERS,
                    BLOCK_N, BLOCK_K,
                ).to(taken.dtype)  # fmt: skip
            else:
                part = tl.load(
                    matrix[:, None] + at[None, :], mask=inside[:, None] & deep[None, :], other=0.0,
                    eviction_policy="evict_first" if few else "",
                )  # fmt: skip
            if few:
                total = tl.dot(part, tl.trans(taken), total, input_precision="ieee", out_dtype=sums)
            else:
                total = tl.dot(taken, tl.trans(part), total, input_precision="ieee", out_dtype=sums)
        if not few:
            total = tl.trans(total)
        if x_scales is not None:
            total = total.to(tl.float32) * tl.load(x_scales + pair // SHARE, mask=valid, other=0.0)[None, :]
        if factors is not None:
            of_row = tl.load(factors + expert.to(tl.int64) * N + columns, mask=inside, other=0.0)
            total *= of_row.to(tl.float32)[:, None]
        if bias is not None:
            total += tl.load(bias + expert * N + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATE >= 0:
            both = tl.permute(tl.reshape(total, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
            gate, up = tl.split(both)
            result = tl.reshape(gated(gate, up, alpha, limit, GATE), (BLOCK_N // 2, BLOCK_M))
            active = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            target = out + pair.to(tl.int64)[None, :] * (N // 2) + active[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=valid[None, :] & (active < N // 2)[:, None])
        else:
            target = out + pair.to(tl.int64)[None, :] * N + columns[:, None]
            tl.store(target, total.to(out.dtype.element_ty), mask=valid[None, :] & inside[:, None])


@triton.jit
def _sum_kernel(
    parts, ids, weights, out, where, EXPERTS, N, CHOSEN: tl.constexpr, ADDS: tl.constexpr, PLACED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for each in tl.static_range(CHOSEN):
        pair = token * CHOSEN + each
        # Outputs of experts on other ranks were never written, and are not read.
        end = tl.where(tl.load(ids + pair) < EXPERTS, N, 0)
        row = pair
        if PLACED:
            row = tl.load(where + pair, mask=end > 0, other=0).to(tl.int64)
        part = tl.load(parts + row * N + columns, mask=columns < end, other=0.0)
        total += tl.load(weights + pair) * part.to(tl.float32)
    target = out + token * N + columns
    if ADDS:
        total += tl.load(target, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=columns < N)


def product(
    x: Tensor,
    stack: DenseStack | StoredStack,
    tiles: Tiles,
    pairs: int,
    share: int,
    shape: TileShape,
    gate: Gate | None = None,
) -> Tensor:
    """``x[pair // share] @ weight.T + bias`` by each pair's expert, gated if there is a gate: [*, K] -> [pairs, N] or
    [pairs, N / 2], in x's dtype; undefined without an expert."""
    if triton_float8_blocks.serves(stack, gate):
        rounded = triton_float8.quantise(x, grouped=True)
        return triton_float8_blocks.product(rounded, stack, tiles, pairs, share, shape, x.dtype, gate)
    tensors, constants = arguments(stack, shape.depth)
    dtype, x_scales = x.dtype, None
    if isinstance(stack, StoredStack) and stack.rounds == "row" and tiles.height >= _ROUNDED:
        x, x_scales = triton_int8.quantise_rows(x) if stack.integers else triton_float8.quantise(x, grouped=False)
    kind, alpha, limit = (-1, 0.0, 0.0) if gate is None else kind_of(gate)
    out = torch.empty(pairs, stack.outputs if gate is None else stack.outputs // 2, dtype=dtype, device=x.device)
    _product_kernel[(len(tiles.experts) * triton.cdiv(stack.outputs, shape.width),)](
        x, x_scales, *tensors, out, tiles.places, tiles.experts, alpha, limit, pairs, stack.outputs, stack.experts, SHARE=share,
        K=x.shape[1], GATE=kind, **constants, BLOCK_M=tiles.height, BLOCK_N=shape.width, BLOCK_K=shape.depth,
        num_warps=shape.warps, num_stages=shape.stages, **dependent_launch.options(tiles.ids, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return out


def weighted_sum(
    parts: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: int,
    add_to: Tensor | None = None,
    where: Tensor | None = None,
) -> Tensor:
    """Each token's sum of its pairs, [T * k, N] -> [T, N], rounded once; those of expert ``experts`` are not read. Added to
    ``add_to`` in place if that is given. ``where`` has each pair's row of the parts, if they are not in the order of pairs."""
    tokens, width = len(ids), parts.shape[1]
    out = torch.empty(tokens, width, dtype=parts.dtype, device=parts.device) if add_to is None else add_to
    _sum_kernel[(tokens, triton.cdiv(width, _SUM_BLOCK))](
        parts, ids, weights, out, ids if where is None else where, experts, width, CHOSEN=ids.shape[1],
        ADDS=add_to is not None, PLACED=where is not None, BLOCK=_SUM_BLOCK, num_warps=4,
        **dependent_launch.options(ids, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return out


def expert_sum(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: DenseStack | StoredStack,
    down: DenseStack | StoredStack,
    gate: Gate,
    tiles: Callable[[int], TilePlan] | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Computes ``reference.expert_sum`` of at least one token; ``x`` is contiguous.

    Args:
        x, ids, weights, gate_up, down: As ``reference.expert_sum`` has them; ids may be of any integers.
        gate: The activation.
        tiles: Gives them, by the number of pairs of tokens and experts; None: ``modelled_tiles`` does.
        add_to: [T, K], contiguous, to which the sum is added in place before it is rounded, and which is returned.
    """
    pairs, chosen = ids.numel(), ids.shape[1]
    if tiles is None:
        tiles = TileTable(gate_up.experts, stored=in_few_bits(gate_up, down)).plan
    plan = tiles(pairs)
    if plan.height == 1:
        return triton_few_tokens.expert_sum(x, ids, weights, gate_up, down, gate, plan, add_to)
    places = align(ids, gate_up.experts, plan.height)
    inner = product(x, gate_up, places, pairs, chosen, plan.gate_up, gate)
    return weighted_sum(product(inner, down, places, pairs, 1, plan.down), ids, weights, gate_up.experts, add_to)
