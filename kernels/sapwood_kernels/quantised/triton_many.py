"""Gluon: products of many rows with a weight in 4-bit groups, widened into the registers that ``wgmma`` multiplies from.

The weight is the left side: a thread widens just the numbers that it multiplies (``triton_few`` says how), and scales them in
registers. Inputs, in the order in which a thread holds its codes (``triton_permuted``), and codes come by the bulk copy engine
into a ring in shared memory, which warps of their own fill (``triton_many_fill``). Two warp groups multiply, each with rows of
the weight of its own, and do not meet: one widens while tensor cores multiply for the other. Programs are as many as there are
multiprocessors, and each takes an equal share of all tiles' groups (stream-K: Osama et al. 2023, arXiv:2301.03598), the last ones
first: a tile that several programs share is summed by the last of them, whose share ends with it. It waits for programs before it
only, which have begun before it, and for what each of them did first. A tile leaves through a place of the ring, and what other
programs have summed and what it is added to come through it: of a thread's own numbers each lies in another row, 2 bytes wide.

Bound: up to 128 rows one read of the weight, O(N K); from there on the products, O(T N K). Measured: docs/quantization.md.
"""

from __future__ import annotations

from typing import NamedTuple

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels.quantised import triton_few
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.quantised.triton_many_fill import _fill_codes, _fill_inputs, _seen, _share
from sapwood_kernels.quantised.triton_permuted import permuted
from sapwood_kernels.quantised.triton_row import Gate

MOST = 512
"""Rows of inputs: for more, a weight is better widened once for all of them."""
_TILE = 128  # rows of the weight, 64 for a warp group
_FEW_GROUPS = 16  # of a program, with 256 rows of inputs

# Kernels of other modules share no function that uses constants with this one: in Triton 3.6 the key under which a kernel is
# cached would depend on which of them had been looked at before, and what was compiled ahead would not be found.
# Triton 3.6 and later ones name these differently.
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_send = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_WIDEN_SCALED = (
    triton_few._WIDEN.removesuffix("}}") + "".join(f"    {{times}} ${i}, ${i}, $6;\n" for i in range(4)) + "}}"
)
_SCALED_HALF = gl.constexpr(_WIDEN_SCALED.format(one="0x64006400", less="sub.f16x2", times="mul.f16x2"))
_SCALED_BFLOAT = gl.constexpr(_WIDEN_SCALED.format(one="0x43004300", less="sub.rn.bf16x2", times="mul.rn.bf16x2"))
_HALVES, _BFLOATS = gl.constexpr((gl.float16,) * 4), gl.constexpr((gl.bfloat16,) * 4)


@gluon.constexpr_function
def _word_layout():
    """Which thread holds which words of eight codes [64, 16]: of the rows that it multiplies, 16 bytes of each."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )


@gluon.jit
def _widen_scaled(codes, zero, scale, dtype: gl.constexpr):
    """Codes less zeros (``triton_few._widen``), which are exact, times a scale of the same dtype: rounded once."""
    places: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r"
    if dtype == gl.float16:
        numbers = gl.inline_asm_elementwise(_SCALED_HALF, places, [codes, zero, scale], _HALVES, is_pure=True, pack=2)
    else:
        numbers = gl.inline_asm_elementwise(
            _SCALED_BFLOAT, places, [codes, zero, scale], _BFLOATS, is_pure=True, pack=2
        )
    return numbers


@gluon.jit
def _ordered(w0, w1, w2, w3):
    """Numbers 4 e + i of a group for i = 0 .. 3, [64, 32] each -> [64, 128] as ``permuted`` has the inputs."""
    four = gl.reshape(gl.join(gl.join(w0, w1), gl.join(w2, w3)), [64, 4, 2, 2, 2, 2, 2])  # e = 8 t + 4 j + 2 k + b; i
    return gl.reshape(gl.permute(four, (0, 6, 5, 2, 3, 1, 4)), [64, 128])


@gluon.jit
def _values(scales, zeros, at, HAS_ZEROS: gl.constexpr):
    """A group's scales and zeros, in 32 bits each: narrower ones would be put together in pairs as soon as they are there."""
    scale = gl.load(scales + at)
    narrow: gl.constexpr = scale.dtype != gl.float32
    scale = scale.to(gl.uint16, bitcast=True).to(gl.int32) if narrow else scale.to(gl.int32, bitcast=True)
    zero = at * 0
    if HAS_ZEROS:
        zero = gl.load(zeros + at).to(gl.int32)
    return scale, zero


@gluon.jit
def _numbers(words, scale, zero, kind: gl.constexpr, dtype: gl.constexpr, LEFT: gl.constexpr):
    """A group's numbers, as tensor cores take their left side, of its codes and the scales of a dtype ``kind``."""
    code = gl.reshape(gl.join((words & 0xFFFF).to(gl.uint16), (words >> 16).to(gl.uint16)), [64, 32])
    rows: gl.constexpr = gl.SliceLayout(1, code.type.layout)
    zero = gl.convert_layout(zero.to(gl.int16), rows, assert_trivial=True) | (0x6400 if dtype == gl.float16 else 0x4300)
    zero, code = gl.broadcast(gl.expand_dims(zero, 1), code)
    if kind == dtype:
        each = gl.convert_layout(scale.to(gl.uint16).to(kind, bitcast=True), rows, assert_trivial=True)
        each, code = gl.broadcast(gl.expand_dims(each, 1), code)
        w0, w1, w2, w3 = _widen_scaled(code, zero, each, dtype)
    else:
        one, code = gl.broadcast(gl.expand_dims(gl.full([64], 1.0, dtype, rows), 1), code)
        w0, w1, w2, w3 = _widen_scaled(code, zero, one, dtype)
        if kind == gl.float32:
            each = scale.to(gl.float32, bitcast=True)
        else:
            each = scale.to(gl.uint16).to(kind, bitcast=True).to(gl.float32)
        each = gl.expand_dims(gl.convert_layout(each, rows, assert_trivial=True), 1)
        w0, w1 = (w0.to(gl.float32) * each).to(dtype), (w1.to(gl.float32) * each).to(dtype)
        w2, w3 = (w2.to(gl.float32) * each).to(dtype), (w3.to(gl.float32) * each).to(dtype)
    return gl.convert_layout(_ordered(w0, w1, w2, w3), LEFT)


@gluon.jit
def _quarters(x):
    """[64, M] -> four of [64, M / 4], of columns that follow each other."""
    half = gl.permute(gl.reshape(x, [64, 2, 2, x.shape[1] // 4]), (0, 3, 2, 1))
    low, high = gl.split(half)
    one, two = gl.split(low)
    three, four = gl.split(high)
    return one, two, three, four


@gluon.jit
def _side_by_side(x):
    """[64, M] as a thread's four numbers, those of the next thread, ...: [64 M]."""
    six = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(six, (3, 0, 2, 4, 1, 5)), [64 * x.shape[1]])


@gluon.jit
def _in_place(x):
    """What :func:`_side_by_side` was made of."""
    six = gl.reshape(x, [x.shape[0] // 512, 4, 8, 4, 2, 2])
    return gl.reshape(gl.permute(six, (1, 4, 2, 0, 3, 5)), [64, x.shape[0] // 64])


@gluon.jit
def _flat_quarters(total):
    """A warp group's part of a tile [64, M]: the quarters of its columns, arranged by :func:`_side_by_side`."""
    one, two, three, four = _quarters(total)
    return _side_by_side(one), _side_by_side(two), _side_by_side(three), _side_by_side(four)


@gluon.jit
def _added(one, two, kept):
    """Two quarters plus what another program has summed of them, in shared memory, [M, 32]."""
    rows: gl.constexpr = one.shape[0] // 32
    first, second = gl.reshape(one, [rows, 32]), gl.reshape(two, [rows, 32])
    first += kept.slice(0, rows, 0).load(first.type.layout)
    second += kept.slice(rows, rows, 0).load(second.type.layout)
    return gl.reshape(first, [rows * 32]), gl.reshape(second, [rows * 32])


@gluon.jit
def _multiply(
    scales, zeros, out, sums, partial, done, taken, coded, ready, free, M, SHARE, N, STEPS, ADDS, GROUP: gl.constexpr,
    PER: gl.constexpr, HAS_ZEROS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group's part of a program: of each tile 64 rows of the weight."""
    held_layout: gl.constexpr = _word_layout()
    dtype: gl.constexpr = taken.dtype
    kind: gl.constexpr = scales.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    sent: gl.constexpr = out.layout
    summed: gl.constexpr = sums.layout
    size: gl.constexpr = 16 * BLOCK_M  # of a quarter of what a group has of a tile
    across, start, end = _share(M, SHARE, N, STEPS, BLOCK_M)
    row = gl.arange(0, 64, gl.SliceLayout(1, held_layout)) + GROUP * 64
    program = gl.program_id(0)
    turn = 0
    while end > start:
        tile = (end - 1) // STEPS
        first = gl.maximum(tile * STEPS, start) - tile * STEPS
        last = end - tile * STEPS
        first_m = tile % across * BLOCK_M
        first_n = tile // across * 128
        value_at = (first_n + row) * (STEPS // PER)
        scale, zero = _values(scales, zeros, value_at + first // PER, HAS_ZEROS)
        total = gl.zeros([64, BLOCK_M], gl.float32, mma)
        for step in range(first, last):
            stage = turn % STAGES
            then = gl.minimum(step + 1, last - 1) // PER
            next_scale, next_zero = _values(scales, zeros, value_at + then, HAS_ZEROS)
            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            words = coded.index(stage).slice(GROUP * 64, 64, 0).load(held_layout)
            numbers = _numbers(words, scale, zero, kind, dtype, left)
            product = warpgroup_mma(numbers, taken.index(stage).permute((1, 0)), total, is_async=True)
            # The operands must stay in their registers until then.
            total, numbers = warpgroup_mma_wait(0, deps=[product, numbers])
            mbarrier.arrive(free.index(stage), count=1)
            scale, zero = next_scale, next_zero
            turn += 1
        gdc_wait()  # before the first is written; from then on it has ended
        one, two, three, four = _flat_quarters(total)
        if last < STEPS:  # the share of a program after this one ends with the tile
            flat = gl.arange(0, size, one.type.layout)
            # Of either half two quarters of the one group's, two of the other's.
            at = partial + (program * 8 + GROUP * 2) * size + flat
            gl.store(at, one)
            gl.store(at + size, two)
            gl.store(at + 4 * size, three)
            gl.store(at + 5 * size, four)
            _together()
            # A bit of its own, no count: where what clears them was left out, in a rehearsal, there is no waiting for ever.
            gl.atomic_or(done + program, GROUP + 1, sem="release")
        else:
            for _ in range(tile * STEPS // SHARE, program):
                stage = turn % STAGES
                mbarrier.wait(ready.index(stage), turn // STAGES & 1)
                kept = _seen(taken.index(stage), gl.float32, [2, BLOCK_M, 32], summed).index(GROUP)
                one, two = _added(one, two, kept)
                mbarrier.arrive(free.index(stage), count=1)
                turn += 1
                stage = turn % STAGES
                mbarrier.wait(ready.index(stage), turn // STAGES & 1)
                kept = _seen(taken.index(stage), gl.float32, [2, BLOCK_M, 32], summed).index(GROUP)
                three, four = _added(three, four, kept)
                mbarrier.arrive(free.index(stage), count=1)
                turn += 1
            stage = turn % STAGES
            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            place = _seen(taken.index(stage), dtype, [2, BLOCK_M, 64], sent).index(GROUP)
            quarters = (one, two, three, four)
            for i in gl.static_range(4):
                each = gl.permute(_in_place(quarters[i]), (1, 0))
                there = place.slice(i * (BLOCK_M // 4), BLOCK_M // 4, 0)
                if ADDS != 0:
                    each += there.load(each.type.layout).to(gl.float32)
                there.store(each.to(dtype))
            fence_async_shared()
            _together()
            _send(out, [first_m, first_n + GROUP * 64], place)
            tma.store_wait(0)
            _together()  # the thread that sends is not necessarily the one that hands the place back
            mbarrier.arrive(free.index(stage), count=1)
            turn += 1
        end -= last - first


# One kernel for all of a model's layers and the rows of a class: to compile one takes a second.
@gluon.jit(do_not_specialize=["M", "SHARE", "N", "STEPS", "ADDS"])
def _many_kernel(
    x, words, scales, zeros, out, sums, partial, done, M, SHARE, N, STEPS, ADDS, PER: gl.constexpr, HAS_ZEROS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    taken = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, 128], x.layout)
    coded = gl.allocate_shared_memory(gl.int32, [STAGES, 128, 16], words.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=2)
        mbarrier.init(free.index(s), count=2)
    gl.warp_specialize(
        [
            (_multiply, (scales, zeros, out, sums, partial, done, taken, coded, ready, free, M, SHARE, N, STEPS, ADDS,
                         gl.constexpr(0), PER, HAS_ZEROS, BLOCK_M, STAGES)),
            (_multiply, (scales, zeros, out, sums, partial, done, taken, coded, ready, free, M, SHARE, N, STEPS, ADDS,
                         gl.constexpr(1), PER, HAS_ZEROS, BLOCK_M, STAGES)),
            (_fill_inputs, (x, out, sums, done, taken, ready, free, M, SHARE, N, STEPS, ADDS, BLOCK_M, STAGES)),
            (_fill_codes, (words, coded, ready, free, M, SHARE, N, STEPS, BLOCK_M, STAGES)),
        ],
        [4, 1, 1],
        [240, 24, 24],  # registers of a thread that multiplies, and of those that fill the ring
    )  # fmt: skip


class Blocks(NamedTuple):
    """What a program takes.

    Attributes:
        rows: A tile's rows of inputs.
        stages: Groups that the ring has room for.
    """

    rows: int
    stages: int


def block_shape(count: int, rows: int, columns: int, processors: int) -> Blocks:
    """The block of a program for ``count`` rows and a weight [rows, columns]. Measured for an 8B model's shapes on an H200."""
    if count <= 32:
        return Blocks(32, 12)
    if count <= 64:
        return Blocks(64, 8)
    # The larger a tile the less is fetched for a product, and the more is summed where several programs share one.
    groups = triton.cdiv(count, 256) * (rows // _TILE) * (columns // 128)
    if count <= 128 or groups < _FEW_GROUPS * processors:
        return Blocks(128, 5)
    return Blocks(256, 3)


def serves(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    """Whether it is one of ``triton_few``'s without factors, and its rows make whole tiles."""
    return triton_few.serves(weight, dtype) and weight.rows % _TILE == 0 and weight.factors is None


def takes(x: Tensor) -> bool:
    """Whether inputs are of 16 bits, and as many as it multiplies faster than others do."""
    return x.dtype in (torch.bfloat16, torch.float16) and triton_few.MOST < len(x) <= MOST


def product(
    x: Tensor,
    weight: GroupedWeight,
    processors: int,
    *,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """``gate(norm(x)) @ weight.T + add_to``.

    Args:
        x: [T, K], or [T, 2 K] with ``gate``, one that is taken (:func:`takes`); rows may lie apart.
        weight: One that :func:`serves`, of fewer than 2^31 outputs in all.
        processors: Multiprocessors.
        norm: An RMSNorm's weight, float32 [K], and eps.
        gate: A gated activation of the input.
        add_to: [T, N], contiguous; becomes the sum.
        blocks: The block of a program, from :func:`block_shape`.

    Returns:
        [T, N].
    """
    count, rows, columns = x.shape[0], weight.rows, weight.columns
    block_m, stages = blocks or block_shape(count, rows, columns, processors)
    steps = columns // 128
    tiles = triton.cdiv(count, block_m) * (rows // _TILE)
    share = triton.cdiv(tiles * steps, processors)
    programs = triton.cdiv(tiles * steps, share)
    done = torch.empty(processors, dtype=torch.int32, device=x.device)
    taken = permuted(x, done, order=weight.order, norm=norm, gate=gate, most=MOST)
    out = torch.empty(count, rows, dtype=x.dtype, device=x.device) if add_to is None else add_to
    partial = torch.empty(programs * 4 * block_m, 32, dtype=torch.float32, device=x.device)
    kind = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    words = weight.codes.view(torch.int32)
    x_order = gl.NVMMASharedLayout.get_default_for([block_m, 128], kind)
    word_order = gl.NVMMASharedLayout.get_default_for([_TILE, 16], gl.int32)
    out_order = gl.NVMMASharedLayout.get_default_for([block_m, 64], kind)
    sum_order = gl.NVMMASharedLayout.get_default_for([block_m, 32], gl.float32)
    _many_kernel[(programs,)](
        TensorDescriptor.from_tensor(taken, [block_m, 128], x_order),
        TensorDescriptor.from_tensor(words, [_TILE, 16], word_order), weight.scales,
        weight.codes if weight.zeros is None else weight.zeros, TensorDescriptor.from_tensor(out, [block_m, 64], out_order),
        TensorDescriptor.from_tensor(partial, [block_m, 32], sum_order), partial, done, count, share, rows, steps,
        int(add_to is not None),
        PER=steps // weight.scales.shape[1], HAS_ZEROS=weight.zeros is not None, BLOCK_M=block_m,
        STAGES=stages, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
