"""Gluon: many tokens rounded to float8 times experts in float8 by blocks of 128 x 128, on Hopper's tensor cores.

Programs, ring, tiles and warp groups are those of ``triton_many_tokens``; a step has 128 inputs, which share a scale. A warp
group multiplies 64 places by 128 columns at a time and adds what comes out, times both scales, to float32 sums of 256 columns
(``triton_float8_blocks`` says why). Of the first product a tile has 128 gates and the 128 that they let through, so that what it
makes is rounded by one scale for each place and written in 8 bits.

Bound: the products, O(T k N K).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sapwood_kernels import triton_float8
from sapwood_kernels.experts import triton_float8_blocks
from sapwood_kernels.experts.stack import StoredStack
from sapwood_kernels.experts.tiles.triton_align import LEAST, Tiles, align
from sapwood_kernels.experts.triton_experts import weighted_sum
from sapwood_kernels.experts.triton_float8_blocks import Float8
from sapwood_kernels.experts.triton_gate import Gate, kind_of
from sapwood_kernels.experts.triton_many_tokens import HEIGHT, _active, _fill, _put, _seen
from sapwood_kernels.quantised.grouped import BLOCK

_STAGES = 4
_LEAST_OF_EXPERT = 64
"""Pairs that an expert has on average from which it is taken: the fewest it was measured with, on an H100."""


@gluon.jit
def _multiply(
    out, out_scales, x_scales, scales, places, experts, taken, held, given, ready, free, COUNT, WORK, BLOCKS, N, EXPERTS, STRIDE,
    OUT_STRIDE, SHARE: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, GATHERS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group's part of a program: of each tile 64 tokens."""
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    steps: gl.constexpr = K // 128
    order: gl.constexpr = held.layout
    halves = _seen(held, [2 * STAGES, 128, 128], order)
    nth = gl.arange(0, 64, gl.SliceLayout(1, wide))
    own = given.index(GROUP)
    turn = 0
    for work in range(gl.program_id(0), WORK, gl.num_programs(0)):
        tile = work // BLOCKS
        block = work % BLOCKS
        expert = gl.load(experts + tile)
        if expert < EXPERTS:
            here = GROUP == 0
            if GROUP == 1:
                here = gl.load(places + tile * 128 + 64) < COUNT
            if here:
                place = tile * 128 + GROUP * 64 + nth
                row = place
                if GATHERS:
                    row = gl.minimum(gl.load(places + place), COUNT - 1) // SHARE
                of_row = x_scales + row
                first = expert * N + block * 256
                second = gl.minimum(first + 128, EXPERTS * N - 1)
                if GATE >= 0:
                    first = expert * N + block * 128
                    second = first + N // 2
                one = scales + first // 128 * steps
                other = scales + second // 128 * steps
                low = gl.zeros([64, 128], gl.float32, wide)
                high = gl.zeros([64, 128], gl.float32, wide)
                mine, by_low, by_high = gl.load(of_row), gl.load(one), gl.load(other)
                for step in range(steps):
                    stage = turn % STAGES
                    mbarrier.wait(ready.index(stage), turn // STAGES & 1)
                    if GATHERS:
                        fence_async_shared()
                    rows = taken.index(2 * stage + GROUP)
                    none = gl.zeros([64, 128], gl.float32, wide)
                    part = warpgroup_mma(
                        rows, halves.index(2 * stage).permute((1, 0)), none, use_acc=False, is_async=True
                    )
                    # The next step's scales, asked for while tensor cores are busy.
                    after = gl.minimum(step + 1, steps - 1)
                    next_mine, next_low, next_high = (
                        gl.load(of_row + after * STRIDE),
                        gl.load(one + after),
                        gl.load(other + after),
                    )
                    part = warpgroup_mma_wait(0, deps=[part])
                    low += part * gl.expand_dims(mine * by_low, 1)
                    part = warpgroup_mma(
                        rows, halves.index(2 * stage + 1).permute((1, 0)), none, use_acc=False, is_async=True
                    )
                    part = warpgroup_mma_wait(0, deps=[part])
                    mbarrier.arrive(free.index(stage), count=1)
                    high += part * gl.expand_dims(mine * by_high, 1)
                    mine, by_low, by_high = next_mine, next_low, next_high
                    turn += 1
                if GATE >= 0:
                    active = _active(low, high, 0.0, 0.0, GATE)
                    scale = gl.maximum(gl.max(gl.abs(active), axis=1) / 448.0, 1e-12)
                    gl.store(out_scales + block * OUT_STRIDE + place, scale)
                    active = gl.minimum(gl.maximum(active / gl.expand_dims(scale, 1), -448.0), 448.0)
                    tma.store_wait(0)
                    own.store(active.to(own.dtype))
                    fence_async_shared()
                    _put(out, [tile * 128 + GROUP * 64, block * 128], own)
                else:
                    tma.store_wait(0)
                    own.store(low.to(own.dtype))
                    fence_async_shared()
                    _put(out, [tile * 128 + GROUP * 64, block * 256], own)
                    tma.store_wait(0)
                    own.store(high.to(own.dtype))
                    fence_async_shared()
                    _put(out, [tile * 128 + GROUP * 64, block * 256 + 128], own)
            else:
                for _ in range(steps):
                    stage = turn % STAGES
                    mbarrier.wait(ready.index(stage), turn // STAGES & 1)
                    mbarrier.arrive(free.index(stage), count=1)
                    turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["COUNT", "WORK", "BLOCKS", "N", "EXPERTS", "STRIDE", "OUT_STRIDE"])
def _grouped_float8_kernel(
    x, x_scales, weight, scales, out, out_scales, places, experts, COUNT, WORK, BLOCKS, N, EXPERTS, STRIDE, OUT_STRIDE,
    SHARE: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, GATHERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    taken = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, 64, 128], weight.layout)
    held = gl.allocate_shared_memory(weight.dtype, [STAGES, 256, 128], weight.layout)
    given = gl.allocate_shared_memory(out.dtype, [2, 64, 128], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=129 if GATHERS else 1)
        mbarrier.init(free.index(s), count=2)
    gl.warp_specialize(
        [
            (_multiply, (out, out_scales, x_scales, scales, places, experts, taken, held, given, ready, free, COUNT, WORK,
                         BLOCKS, N, EXPERTS, STRIDE, OUT_STRIDE, SHARE, K, GATE, GATHERS, STAGES, gl.constexpr(0))),
            (_multiply, (out, out_scales, x_scales, scales, places, experts, taken, held, given, ready, free, COUNT, WORK,
                         BLOCKS, N, EXPERTS, STRIDE, OUT_STRIDE, SHARE, K, GATE, GATHERS, STAGES, gl.constexpr(1))),
            (_fill, (x, weight, places, experts, taken, held, ready, free, COUNT, WORK, BLOCKS, N, EXPERTS, SHARE, K, GATE,
                     GATHERS, STAGES, gl.constexpr(128))),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


def serves(*stacks: StoredStack) -> bool:
    """Whether the matrices are such as ``triton_float8_blocks`` takes."""
    return all(triton_float8_blocks.serves(each) for each in stacks)


def takes(pairs: int, experts: int) -> bool:
    """Whether this many pairs of tokens and experts are as many as it multiplies faster than ``triton_float8_blocks``."""
    return pairs >= max(_LEAST_OF_EXPERT * experts, LEAST)


def first(x: Float8, stack: StoredStack, tiles: Tiles, processors: int, gate: Gate) -> Float8:
    """``gate(x @ weight.T)`` by each pair's expert, rounded again, in the order of the tiles.

    Args:
        x: Rows of tokens in float8 by groups of 128, as ``triton_float8.quantise`` gives them: [T, K], scales [T, K / 128].
        stack: The matrices: such as are served (:func:`serves`).
        tiles: The pairs in tiles of ``triton_many_tokens.HEIGHT``.
        processors: Multiprocessors.
        gate: The activation.

    Returns:
        Likewise, [places, N / 2] and [places, N / 256]; undefined in places without a pair.
    """
    places, active = len(tiles.places), stack.outputs // 2
    out = torch.empty(places, active, dtype=torch.float8_e4m3fn, device=stack.codes.device)
    scales = torch.empty(active // BLOCK, places, dtype=torch.float32, device=stack.codes.device)
    _run(x, stack, tiles, processors, out, scales, kind_of(gate)[0])
    return out, scales.t()


def second(x: Float8, stack: StoredStack, tiles: Tiles, processors: int, dtype: torch.dtype) -> Tensor:
    """``x @ weight.T`` of what :func:`first` made, [places, N] of a dtype of 16 bits."""
    out = torch.empty(len(tiles.places), stack.outputs, dtype=dtype, device=stack.codes.device)
    _run(x, stack, tiles, processors, out, None, -1)
    return out


def _run(
    x: Float8, stack: StoredStack, tiles: Tiles, processors: int, out: Tensor, out_scales: Tensor | None, gate: int
) -> None:
    (codes, x_scales), gathers = x, out_scales is not None
    experts, outputs, width = stack.codes.shape
    order = gl.NVMMASharedLayout.get_default_for([HEIGHT, BLOCK], gl.float8e4nv)
    kind = gl.float8e4nv if gathers else gl.float16 if out.dtype == torch.float16 else gl.bfloat16
    result = gl.NVMMASharedLayout.get_default_for([64, BLOCK], kind)
    blocks = triton.cdiv(outputs, 256)
    work = len(tiles.experts) * blocks
    _grouped_float8_kernel[(min(processors, work),)](
        codes if gathers else TensorDescriptor.from_tensor(codes, [HEIGHT, BLOCK], order), x_scales,
        TensorDescriptor.from_tensor(stack.codes.view(experts * outputs, width), [BLOCK, BLOCK], order), stack.scales,
        TensorDescriptor.from_tensor(out, [64, BLOCK], result), x_scales if out_scales is None else out_scales, tiles.places,
        tiles.experts, tiles.ids.numel(), work, blocks, outputs, experts, x_scales.stride(1), len(tiles.places),
        SHARE=tiles.ids.shape[1], K=width, GATE=gate, GATHERS=gathers, STAGES=_STAGES, num_warps=4,
    )  # fmt: skip


def expert_sum(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: StoredStack,
    down: StoredStack,
    gate: Gate,
    processors: int,
    add_to: Tensor | None = None,
) -> Tensor:
    """Computes ``triton_experts.expert_sum``, whose arguments these are, of as many pairs as it takes (:func:`takes`), of inputs
    and of what the first product makes rounded to float8 by groups of 128."""
    tiles = align(ids, gate_up.experts, HEIGHT)
    inner = first(triton_float8.quantise(x, grouped=True), gate_up, tiles, processors, gate)
    parts = second(inner, down, tiles, processors, x.dtype)
    return weighted_sum(parts, ids, weights, gate_up.experts, add_to, tiles.where)
