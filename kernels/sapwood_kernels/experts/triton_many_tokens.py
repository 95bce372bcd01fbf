"""Gluon: an expert's matrix times tiles of its tokens on Hopper's tensor cores, by programs that stay.

Pairs of a token and an expert lie sorted by expert in whole tiles of 128 (``tiles``). A program for each multiprocessor takes
tile after tile. A part of it fills a ring in shared memory: with the matrix by the bulk copy engine, with tokens likewise, or,
for the first product, row by row from where they are. Two warp groups multiply, each 64 places of a tile by 256 columns, and do
not meet: one gates and writes what it has while tensor cores multiply for the other. That the second began 2 or 3 steps after
the first made no difference. Where a group's places are all empty it multiplies nothing: such a tile costs half.

Results lie in the order of the tiles. Bound: the products, O(T k N K).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sapwood_kernels.experts.stack import DenseStack
from sapwood_kernels.experts.tiles.triton_align import LEAST, Tiles, align
from sapwood_kernels.experts.triton_experts import weighted_sum
from sapwood_kernels.experts.triton_gate import Gate, kind_of

HEIGHT = 128
"""Places of a tile."""
_WIDTH, _DEPTH, _STAGES = 256, 64, 4
_LEAST_OF_EXPERT = 128
"""Pairs that an expert has on average from which it is taken. A layer takes an H200, of 128 experts of 768, with 512, 192,
128 and 64 pairs each, 1207, 720, 633 and 540 us for 1438, 779, 638 and 518; of 66 experts of 1408 with 372, 248 and 124 pairs
1136, 812 and 540 for 1105, 827 and 556."""

# Triton 3.6 and later ones name these differently.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_put = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _seen(kept, shape: gl.constexpr, layout: gl.constexpr):
        return kept.reinterpret(kept.dtype, shape, layout)
else:

    @gluon.jit
    def _seen(kept, shape: gl.constexpr, layout: gl.constexpr):
        return kept._reinterpret(kept.dtype, shape, layout)


@gluon.jit
def _active(gate, up, alpha, limit, GATE: gl.constexpr):
    """What ``triton_gate.gated`` computes."""
    if GATE == 2:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit) + 1.0
        active = gate / (1.0 + gl.exp(-alpha * gate))
    elif GATE == 1:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + gl.exp(-z))
    else:
        active = gate / (1.0 + gl.exp(-gate))
    return active * up


@gluon.jit
def _fill(
    x, weight, places, experts, taken, held, ready, free, COUNT, WORK, BLOCKS, N, EXPERTS, SHARE: gl.constexpr,
    K: gl.constexpr, GATE: gl.constexpr, GATHERS: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills the ring, DEPTH columns a step, which have 128 bytes: four warps' part of a program."""
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    order: gl.constexpr = weight.layout
    rows = _seen(taken, [STAGES, 128, DEPTH], order)
    halves = _seen(held, [2 * STAGES, 128, DEPTH], order)
    steps: gl.constexpr = (K + DEPTH - 1) // DEPTH
    turn = 0
    for work in range(gl.program_id(0), WORK, gl.num_programs(0)):
        tile = work // BLOCKS
        block = work % BLOCKS
        expert = gl.load(experts + tile)
        if expert < EXPERTS:
            first = expert * N + block * 256
            second = first + 128
            if (GATE == 0) | (GATE == 1):
                first = expert * N + block * 128
                second = first + N // 2
            if GATHERS:
                pair = gl.load(places + tile * 128 + gl.arange(0, 128, gl.SliceLayout(1, layout)))
                token = gl.minimum(pair, COUNT - 1) // SHARE
                each = gl.expand_dims(gl.arange(0, DEPTH, gl.SliceLayout(0, layout)), 0)
                at = x + (gl.expand_dims(token, 1).to(gl.int64) * K + each)
            for step in range(steps):
                stage = turn % STAGES
                mbarrier.wait(free.index(stage), turn // STAGES & 1 ^ 1)
                mbarrier.expect(ready.index(stage), 256 * 128 if GATHERS else 384 * 128)
                _fetch(weight, [first, step * DEPTH], ready.index(stage), halves.index(2 * stage))
                _fetch(weight, [second, step * DEPTH], ready.index(stage), halves.index(2 * stage + 1))
                if GATHERS:
                    _copy(rows.index(stage), at)
                    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
                    at += DEPTH
                else:
                    _fetch(x, [tile * 128, step * DEPTH], ready.index(stage), rows.index(stage))
                turn += 1


@gluon.jit
def _multiply(
    out, places, experts, taken, held, given, ready, free, alpha, limit, COUNT, WORK, BLOCKS, EXPERTS,
    K: gl.constexpr, GATE: gl.constexpr, GATHERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group's part of a program: of each tile 64 tokens."""
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    steps: gl.constexpr = (K + 63) // 64
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
                total = gl.zeros([64, 256], gl.float32, wide)
                for step in range(steps):
                    stage = turn % STAGES
                    mbarrier.wait(ready.index(stage), turn // STAGES & 1)
                    if GATHERS:
                        fence_async_shared()
                    product = warpgroup_mma(
                        taken.index(2 * stage + GROUP), held.index(stage).permute((1, 0)), total, is_async=True
                    )
                    total = warpgroup_mma_wait(1, deps=[product])
                    mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
                    turn += 1
                total = warpgroup_mma_wait(0, deps=[total])
                mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), count=1)
                # Splits columns into 0 to 127 and the others; the same thread holds both halves.
                low, high = gl.split(gl.permute(gl.reshape(total, [64, 2, 128]), (0, 2, 1)))
                if GATE >= 0:
                    if GATE == 2:
                        low, high = gl.split(gl.reshape(total, [64, 128, 2]))
                    result = _active(low, high, alpha, limit, GATE).to(own.dtype)
                    tma.store_wait(0)
                    own.store(result)
                    fence_async_shared()
                    _put(out, [tile * 128 + GROUP * 64, block * 128], own)
                else:
                    tma.store_wait(0)
                    own.store(gl.convert_layout(low.to(own.dtype), half, assert_trivial=True))
                    fence_async_shared()
                    _put(out, [tile * 128 + GROUP * 64, block * 256], own)
                    rest = gl.convert_layout(high.to(own.dtype), half, assert_trivial=True)
                    tma.store_wait(0)
                    own.store(rest)
                    fence_async_shared()
                    _put(out, [tile * 128 + GROUP * 64, block * 256 + 128], own)
            else:
                for _ in range(steps):
                    stage = turn % STAGES
                    mbarrier.wait(ready.index(stage), turn // STAGES & 1)
                    mbarrier.arrive(free.index(stage), count=1)
                    turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["COUNT", "WORK", "BLOCKS", "N", "EXPERTS"])
def _grouped_kernel(
    x, weight, out, places, experts, alpha, limit, COUNT, WORK, BLOCKS, N, EXPERTS, SHARE: gl.constexpr, K: gl.constexpr,
    GATE: gl.constexpr, GATHERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = weight.dtype
    taken = gl.allocate_shared_memory(dtype, [2 * STAGES, 64, 64], weight.layout)
    held = gl.allocate_shared_memory(dtype, [STAGES, 256, 64], weight.layout)
    given = gl.allocate_shared_memory(dtype, [2, 64, 128], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=129 if GATHERS else 1)
        mbarrier.init(free.index(s), count=2)
    gl.warp_specialize(
        [
            (_multiply, (out, places, experts, taken, held, given, ready, free, alpha, limit, COUNT, WORK, BLOCKS,
                         EXPERTS, K, GATE, GATHERS, STAGES, gl.constexpr(0))),
            (_multiply, (out, places, experts, taken, held, given, ready, free, alpha, limit, COUNT, WORK, BLOCKS,
                         EXPERTS, K, GATE, GATHERS, STAGES, gl.constexpr(1))),
            (_fill, (x, weight, places, experts, taken, held, ready, free, COUNT, WORK, BLOCKS, N, EXPERTS, SHARE, K, GATE,
                     GATHERS, STAGES, gl.constexpr(64))),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


def serves(*stacks: DenseStack) -> bool:
    """Whether the matrices are of 16 bits without biases, and widths are what copies and tiles take."""
    return all(
        each.bias is None
        and each.weight.dtype.itemsize == 2
        and each.weight.is_contiguous()
        and each.weight.shape[2] % _DEPTH == 0
        and each.outputs % 16 == 0
        for each in stacks
    )


def takes(pairs: int, experts: int) -> bool:
    """Whether this many pairs of tokens and experts are as many as it multiplies faster than ``triton_experts``."""
    return pairs >= max(_LEAST_OF_EXPERT * experts, LEAST)


def product(
    x: Tensor,
    stack: DenseStack,
    tiles: Tiles,
    processors: int,
    gate: Gate | None = None,
    *,
    gathers: bool = False,
) -> Tensor:
    """``x @ weight.T`` by each pair's expert, gated if there is a gate, in the order of the tiles.

    Args:
        x: A row for each place of the tiles, or with ``gathers`` for each token; contiguous.
        stack: The matrices: such as are served (:func:`serves`).
        tiles: The pairs in tiles of :data:`HEIGHT`.
        processors: Multiprocessors.
        gate: The activation.
        gathers: Whether x is in the order of tokens.

    Returns:
        [places, N] or [places, N / 2], in x's dtype; undefined in places without a pair.
    """
    experts, outputs, width = stack.weight.shape
    kind, alpha, limit = (-1, 0.0, 0.0) if gate is None else kind_of(gate)
    out = torch.empty(len(tiles.places), outputs if gate is None else outputs // 2, dtype=x.dtype, device=x.device)
    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    order = gl.NVMMASharedLayout.get_default_for([HEIGHT, _DEPTH], dtype)
    result = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    blocks = triton.cdiv(outputs, _WIDTH)
    work = len(tiles.experts) * blocks
    _grouped_kernel[(min(processors, work),)](
        x if gathers else TensorDescriptor.from_tensor(x, [HEIGHT, _DEPTH], order),
        TensorDescriptor.from_tensor(stack.weight.view(experts * outputs, width), [128, _DEPTH], order),
        TensorDescriptor.from_tensor(out, [64, 128], result), tiles.places, tiles.experts, alpha, limit, tiles.ids.numel(),
        work, blocks, outputs, experts, SHARE=tiles.ids.shape[1], K=width, GATE=kind, GATHERS=gathers, STAGES=_STAGES,
        num_warps=4,
    )  # fmt: skip
    return out


def expert_sum(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: DenseStack,
    down: DenseStack,
    gate: Gate,
    processors: int,
    add_to: Tensor | None = None,
) -> Tensor:
    """Computes ``triton_experts.expert_sum``, whose arguments these are, of as many pairs as it takes (:func:`takes`)."""
    tiles = align(ids, gate_up.experts, HEIGHT)
    inner = product(x, gate_up, tiles, processors, gate, gathers=True)
    parts = product(inner, down, tiles, processors)
    return weighted_sum(parts, ids, weights, gate_up.experts, add_to, tiles.where)
