"""Gluon: products of many rows with a weight in 4-bit groups, widened into the registers that ``wgmma`` multiplies from.

The weight is the left side: a thread widens just the numbers that it multiplies (``triton_few`` says how), and scales them in
registers, while tensor cores multiply those of the group before. Inputs come by the bulk copy engine, in the order in which a
thread holds its codes (:func:`permuted`). Programs are as many as the device runs at once, and each takes an equal share of all
tiles' groups, one after another (stream-K: Osama et al. 2023, arXiv:2301.03598); tiles that several programs share are summed by
a second kernel, in their order.

Bound: up to 128 rows one read of the weight, O(N K); from there on the products, O(T N K). Measured: docs/quantization.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sapwood_kernels.quantised import triton_few
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.quantised.triton_few import _widen, bits

MOST = 512
"""Rows of inputs: for more, a weight is better widened once for all of them."""
_TILE = 128
"""A tile's rows of the weight."""
_LARGE = 1 << 25  # numbers of a weight
_PER_SUM = 16  # inputs' rows that a program of the second kernel takes

# Triton 3.6 and later ones name them differently.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_WIDEN_SCALED = (
    triton_few._WIDEN.removesuffix("}}") + "".join(f"    {{times}} ${i}, ${i}, $6;\n" for i in range(4)) + "}}"
)
_SCALED_HALF = gl.constexpr(_WIDEN_SCALED.format(one="0x64006400", less="sub.f16x2", times="mul.f16x2"))
_SCALED_BFLOAT = gl.constexpr(_WIDEN_SCALED.format(one="0x43004300", less="sub.rn.bf16x2", times="mul.rn.bf16x2"))
_HALVES, _BFLOATS = gl.constexpr((gl.float16,) * 4), gl.constexpr((gl.bfloat16,) * 4)


@gluon.constexpr_function
def _code_layout(block_n, warps):
    """Which thread holds which codes [block_n, 32]: the rows that it multiplies, 16 bytes of each."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *[[16 * warps << b, 0] for b in bits(block_n // (16 * warps))]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << b, 0] for b in bits(warps)],
        block_bases=[],
        shape=[block_n, 32],
    )


@gluon.jit
def _widen_scaled(codes, zero, scale, dtype: gl.constexpr):
    """``_widen``, times a scale of the same dtype: rounded once, since codes less zeros are exact."""
    places: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r"
    if dtype == gl.float16:
        numbers = gl.inline_asm_elementwise(_SCALED_HALF, places, [codes, zero, scale], _HALVES, is_pure=True, pack=2)
    else:
        numbers = gl.inline_asm_elementwise(
            _SCALED_BFLOAT, places, [codes, zero, scale], _BFLOATS, is_pure=True, pack=2
        )
    return numbers


@gluon.jit
def _ordered(w0, w1, w2, w3, N: gl.constexpr):
    """Numbers 4 e + i of a group for i = 0 .. 3, [N, 32] each -> [N, 128] as ``permuted`` has the inputs."""
    four = gl.reshape(gl.join(gl.join(w0, w1), gl.join(w2, w3)), [N, 4, 2, 2, 2, 2, 2])  # e = 8 t + 4 j + 2 k + b; i
    return gl.reshape(gl.permute(four, (0, 6, 5, 2, 3, 1, 4)), [N, 128])


@gluon.jit
def _numbers(code, scale, zero, dtype: gl.constexpr, N: gl.constexpr, LEFT: gl.constexpr):
    """A group's numbers, as tensor cores take their left side."""
    zero = zero | (0x6400 if dtype == gl.float16 else 0x4300)
    zero, code = gl.broadcast(gl.expand_dims(zero, 1), code)
    if scale.dtype == dtype:
        each, code = gl.broadcast(gl.expand_dims(scale, 1), code)
        w0, w1, w2, w3 = _widen_scaled(code, zero, each, dtype)
    else:
        w0, w1, w2, w3 = _widen(code, zero, dtype)
        wide = gl.expand_dims(scale.to(gl.float32), 1)
        w0, w1 = (w0.to(gl.float32) * wide).to(dtype), (w1.to(gl.float32) * wide).to(dtype)
        w2, w3 = (w2.to(gl.float32) * wide).to(dtype), (w3.to(gl.float32) * wide).to(dtype)
    return gl.convert_layout(_ordered(w0, w1, w2, w3, N), LEFT)


@gluon.jit
def _held(
    codes, scales, zeros, code_at, value_at, step, STEPS: gl.constexpr, GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr
):
    """A step's codes, scales and zeros."""
    group = step * GROUPS // STEPS
    scale = gl.load(scales + (value_at + group))
    zero = (value_at * 0).to(gl.int16)
    if HAS_ZEROS:
        zero = gl.load(zeros + (value_at + group)).to(gl.int16)
    return gl.load(codes + (code_at + step * 32)), scale, zero


@gluon.jit
def _many_kernel(
    x, codes, scales, zeros, out, partial, M, SHARE, N: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr,
    HAS_ZEROS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    code_layout: gl.constexpr = _code_layout(BLOCK_N, WARPS)
    steps: gl.constexpr = K // 128
    dtype: gl.constexpr = x.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    across = (M + BLOCK_M - 1) // BLOCK_M
    at = gl.program_id(0) * SHARE
    end = gl.minimum(at + SHARE, across * (N // BLOCK_N) * steps)

    taken = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, 128], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    own = gl.arange(0, BLOCK_N, gl.SliceLayout(1, code_layout))
    word = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, code_layout)), 0)
    turn = 0  # of the stages
    while at < end:
        tile = at // steps
        first = at % steps
        count = gl.minimum(end - at, steps - first)
        last = first + count - 1
        first_m = tile % across * BLOCK_M
        first_n = tile // across * BLOCK_N
        for s in gl.static_range(STAGES):
            stage = (turn + s) % STAGES
            mbarrier.expect(ready.index(stage), BLOCK_M * 256, pred=s < count)
            _fetch(x, [first_m, (first + s) * 128], ready.index(stage), taken.index(stage), pred=s < count)
        code_at = gl.expand_dims(first_n + own, 1) * (K // 4) + word
        value_at = (first_n + own) * GROUPS
        code, scale, zero = _held(codes, scales, zeros, code_at, value_at, first, steps, GROUPS, HAS_ZEROS)
        held = ()  # of the next DEPTH steps, which are under way; the last one is read again
        for d in gl.static_range(DEPTH):
            step = gl.minimum(first + d + 1, last)
            held += (_held(codes, scales, zeros, code_at, value_at, step, steps, GROUPS, HAS_ZEROS),)  # type: ignore[assignment]
        numbers = _numbers(code, scale, zero, dtype, BLOCK_N, left)
        total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
        for i in range(count):
            stage = turn % STAGES
            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            product = warpgroup_mma(numbers, taken.index(stage).permute((1, 0)), total, is_async=True)
            step = gl.minimum(first + i + DEPTH + 1, last)
            coming = ()
            for d in gl.static_range(DEPTH - 1):
                coming += (held[d + 1],)  # type: ignore[assignment]
            coming += (_held(codes, scales, zeros, code_at, value_at, step, steps, GROUPS, HAS_ZEROS),)  # type: ignore[assignment]
            later = _numbers(held[0][0], held[0][1], held[0][2], dtype, BLOCK_N, left)  # type: ignore[misc]
            # What is being multiplied must stay in its registers until then; what is widened meanwhile passes through.
            total, numbers, later = warpgroup_mma_wait(0, deps=[product, numbers, later])
            _together()
            more = i + STAGES < count
            mbarrier.expect(ready.index(stage), BLOCK_M * 256, pred=more)
            _fetch(x, [first_m, (first + i + STAGES) * 128], ready.index(stage), taken.index(stage), pred=more)
            numbers = later
            held = coming
            turn += 1
        n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma)), 1)
        m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma)), 0)
        if count == steps:
            inside = (first_m + m < M) & (n < BLOCK_N)
            gl.store(out + ((first_m + m) * N + (first_n + n)), total.to(out.dtype.element_ty), mask=inside)
        else:
            # A program's first tile may lack its first inputs, its last one the last. Threads' numbers lie side by side.
            slot = gl.program_id(0) * 2 + 1 - gl.minimum(first, 1)
            inner = ((n // 8) * (BLOCK_M // 8) + m // 8) * 64 + n % 8 * 8 + m % 8
            gl.store(partial + (slot * (BLOCK_M * BLOCK_N) + inner), total)
        at += count
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))


@triton.jit
def _sum_kernel(
    partial, out, M, SHARE, N: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of tiles whose inputs several programs have taken."""
    across = tl.cdiv(M, BLOCK_M)
    tile, part = tl.program_id(0) // (BLOCK_M // ROWS), tl.program_id(0) % (BLOCK_M // ROWS)
    first, last = tile * STEPS // SHARE, (tile * STEPS + STEPS - 1) // SHARE
    m = tile % across * BLOCK_M + part * ROWS + tl.arange(0, ROWS)
    if first < last:
        flat = tl.arange(0, ROWS * BLOCK_N)
        place = (flat // (8 * ROWS) * (BLOCK_M // 8) + part * (ROWS // 8) + flat // 64 % (ROWS // 8)) * 64 + flat % 64
        total = tl.load(partial + (first * 2 + 1) * (BLOCK_M * BLOCK_N) + place)
        for each in range(first + 1, last + 1):
            total += tl.load(partial + each * 2 * (BLOCK_M * BLOCK_N) + place)
        total = tl.permute(tl.reshape(total, (BLOCK_N // 8, ROWS // 8, 8, 8)), (1, 3, 0, 2))
        n = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.reshape(total, (ROWS, BLOCK_N)).to(out.dtype.element_ty)
        tl.store(out + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None])


@triton.jit
def _permute_kernel(x, out, x_stride, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at % 128
    # Column 32 i + 8 j + 2 t + b of a group is input 32 t + 8 j + 4 b + i.
    source = at - within + within // 2 % 4 * 32 + within // 8 % 4 * 8 + within % 2 * 4 + within // 32
    tl.store(out + row * K + at, tl.load(x + row * x_stride + source, mask=at < K, other=0.0), mask=at < K)


def permuted(x: Tensor) -> Tensor:
    """Rows [T, K] with each group's numbers in the order in which a thread that holds their codes multiplies them."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _permute_kernel[(len(x), triton.cdiv(x.shape[1], 2048))](x, out, x.stride(0), x.shape[1], BLOCK=2048)
    return out


def block_shape(count: int, rows: int, columns: int) -> tuple[int, int, int, int, int, int]:
    """A tile's rows of inputs and of the weight, warps, stages of inputs, groups of codes that are under way, and programs of a
    multiprocessor. Measured for an 8B model's shapes on an H200."""
    if count <= 32:
        return 32, _TILE, 8, 4, 3, 2
    if count <= 64:
        return 64, _TILE, 8, 4, 2, 2
    if count <= 128:
        return (128, _TILE, 4, 3, 1, 2) if rows * columns > _LARGE else (128, _TILE, 8, 4, 2, 1)
    return 256, _TILE, 8, 3, 1, 1


def serves(weight: GroupedWeight) -> bool:
    """Whether it is one of ``triton_few``'s without factors, and its rows make whole tiles."""
    return triton_few.serves(weight, torch.bfloat16) and weight.rows % _TILE == 0 and weight.factors is None


def takes(x: Tensor) -> bool:
    """Whether inputs are of 16 bits, and as many as it multiplies faster than others do."""
    return x.dtype in (torch.bfloat16, torch.float16) and triton_few.MOST < len(x) <= MOST


def product(
    x: Tensor, weight: GroupedWeight, processors: int, blocks: tuple[int, int, int, int, int, int] | None = None
) -> Tensor:
    """``x @ weight.T``; arguments as of ``triton_grouped.product``, ``weight`` one that :func:`serves`, of fewer than 2^31
    outputs in all."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    count, rows, columns = x.shape[0], weight.rows, weight.columns
    block_m, block_n, warps, stages, depth, resident = blocks or block_shape(count, rows, columns)
    steps = columns // 128
    tiles = triton.cdiv(count, block_m) * (rows // block_n)
    share = triton.cdiv(tiles * steps, processors * resident)
    programs = triton.cdiv(tiles * steps, share)
    out = torch.empty(count, rows, dtype=x.dtype, device=x.device)
    partial = torch.empty(2 * programs * block_m * block_n, dtype=torch.float32, device=x.device)
    kind = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    order = gl.NVMMASharedLayout.get_default_for([block_m, 128], kind)
    _many_kernel[(programs,)](
        TensorDescriptor.from_tensor(permuted(x), [block_m, 128], order), weight.codes.view(torch.uint16), weight.scales,
        weight.codes if weight.zeros is None else weight.zeros, out, partial, count, share, rows, columns, weight.scales.shape[1],
        HAS_ZEROS=weight.zeros is not None, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, DEPTH=depth,
        WARPS=warps, num_warps=warps,
    )  # fmt: skip
    if share % steps:
        _sum_kernel[(tiles * (block_m // _PER_SUM),)](
            partial, out, count, share, rows, steps, BLOCK_M=block_m, BLOCK_N=block_n, ROWS=_PER_SUM, num_warps=4
        )
    return out
