"""Gluon: a linear layer on up to 16 rows with a weight of 4-bit groups, the gate or the sum after it in the same kernel.

Codes go from memory to the registers of tensor cores as they lie there, with no copy between: which number of a row a thread
holds is free, if it holds the same one of the input. A code becomes an exact bfloat16 or float16 by three operations for two: its
bits are those of a number from 128 (1024) on, from which the zero is subtracted with as much. Sums of 128 products are scaled in
float32. A row's numbers are shared out over warps, so that enough of memory is under way at once.

Bound: one read of codes, zeros and scales. O(N K). Measured: docs/quantization.md.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sapwood_kernels.quantised.grouped import GroupedWeight

Gate = Literal["silu", "gelu_tanh"]

MOST = 16
"""Rows of a product."""
_STEP = 128
_WHOLE = 64  # outputs that any tile divides

_WIDEN = """{{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000f000f, {one}, 0xea;
    shr.u32 t, $4, 4;
    lop3.b32 $1, t, 0x000f000f, {one}, 0xea;
    shr.u32 t, $4, 8;
    lop3.b32 $2, t, 0x000f000f, {one}, 0xea;
    shr.u32 t, $4, 12;
    lop3.b32 $3, t, 0x000f000f, {one}, 0xea;
    {less} $0, $0, $5;
    {less} $1, $1, $5;
    {less} $2, $2, $5;
    {less} $3, $3, $5;
}}"""
_WIDEN_HALF = gl.constexpr(_WIDEN.format(one="0x64006400", less="sub.f16x2"))
_HALVES, _BFLOATS = gl.constexpr((gl.float16,) * 4), gl.constexpr((gl.bfloat16,) * 4)
_WIDEN_BFLOAT = gl.constexpr(_WIDEN.format(one="0x43004300", less="sub.rn.bf16x2"))


@gluon.jit
def _widen(codes, zero, dtype: gl.constexpr):
    """The four codes in each 16 bits as numbers less the zero, which comes as the bits of such a number: exact."""
    places: gl.constexpr = "=&r,=&r,=&r,=&r,r,r"
    if dtype == gl.float16:
        numbers = gl.inline_asm_elementwise(_WIDEN_HALF, places, [codes, zero], _HALVES, is_pure=True, pack=2)
    else:
        numbers = gl.inline_asm_elementwise(_WIDEN_BFLOAT, places, [codes, zero], _BFLOATS, is_pure=True, pack=2)
    return numbers


@gluon.jit
def _quarters(x):
    """[S, M, K] -> its numbers 4 e + i for i = 0 .. 3: four of [S, K / 4, M]."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    first, second = gl.permute(first, (0, 2, 1)), gl.permute(second, (0, 2, 1))
    return first, second, gl.permute(third, (0, 2, 1)), gl.permute(fourth, (0, 2, 1))


@gluon.constexpr_function
def bits(count):
    """The bits of a power of 2 below it."""
    return list(range(count.bit_length() - 1))


# Layouts are made inside the kernels: what is noted to be compiled elsewhere is described in JSON, which has none.
@gluon.constexpr_function
def _code_layout(splits, wide, tall):
    """Which thread holds which codes [splits, rows, 32]: as tensor cores take them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0], *[[0, 16 * wide << b, 0] for b in bits(tall)]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[*[[0, 16 << b, 0] for b in bits(wide)], *[[1 << b, 0, 0] for b in bits(splits)]],
        block_bases=[],
        shape=[splits, 16 * wide * tall, 32],
    )


@gluon.constexpr_function
def _input_layout(splits, wide, block_m):
    """Which thread holds which inputs [splits, block_m, 128]."""
    return gl.DistributedLinearLayout(
        reg_bases=[*[[0, 0, 1 << b] for b in range(5)], *[[0, 8 << b, 0] for b in bits(block_m // 8)]],
        lane_bases=[[0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[*[[0, 0, 0] for _ in bits(wide)], *[[1 << b, 0, 0] for b in bits(splits)]],
        block_bases=[],
        shape=[splits, block_m, 128],
    )


@gluon.jit
def _few_kernel(
    x, codes, scales, zeros, factors, bias, residual, out, M, x_stride, N: gl.constexpr, K: gl.constexpr,
    GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr,
    ADDS: gl.constexpr, GATE: gl.constexpr, SPLITS: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr,
    DEPTH: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    # Tensors are [SPLITS, rows of the weight, inputs]: a warp has one of SPLITS shares of the inputs. Codes come four in 16 bits.
    code_layout: gl.constexpr = _code_layout(SPLITS, WIDE, TALL)
    input_layout: gl.constexpr = _input_layout(SPLITS, WIDE, BLOCK_M)
    width: gl.constexpr = 128
    words: gl.constexpr = width // 4
    rows: gl.constexpr = 16 * WIDE * TALL
    own: gl.constexpr = rows // 2 if GATE else rows  # outputs of this program; with a gate it has twice as many rows
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SPLITS, WIDE, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    sums: gl.constexpr = gl.SliceLayout(2, mma)
    dtype: gl.constexpr = x.dtype.element_ty
    every: gl.constexpr = K // width
    steps: gl.constexpr = (every + SPLITS - 1) // SPLITS  # of a share

    first = gl.program_id(0) * own
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(2, code_layout)))
    row = gl.expand_dims(gl.expand_dims(first + row % own + row // own * N, 0), 2)
    share = gl.expand_dims(
        gl.expand_dims(gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, code_layout))), 1), 2
    )
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, words, gl.SliceLayout(0, gl.SliceLayout(1, code_layout))), 0), 1)
    code_step = share * steps + row * 0 + word * 0
    code_at = codes + (row.to(gl.int64) * (K // 4) + share * (steps * words) + word)

    scale_row = gl.arange(0, rows, gl.SliceLayout(0, sums))
    scale_row = gl.expand_dims(first + scale_row % own + scale_row // own * N, 0)
    scale_step = gl.expand_dims(gl.arange(0, SPLITS, gl.SliceLayout(1, sums)), 1) * steps + scale_row * 0

    token = gl.expand_dims(
        gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, input_layout))), 0), 2
    )
    taker = gl.expand_dims(
        gl.expand_dims(gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, input_layout))), 1), 2
    )
    column = gl.expand_dims(
        gl.expand_dims(gl.arange(0, width, gl.SliceLayout(0, gl.SliceLayout(1, input_layout))), 0), 1
    )
    input_step = taker * steps + column * 0 + token * 0
    input_at = x + (gl.minimum(token, M - 1) * x_stride + taker * (steps * width) + column)

    held = ()  # codes of the next DEPTH steps, which are under way
    for d in gl.static_range(DEPTH):
        held += (gl.load(code_at + d * words, mask=(code_step + d < every) & (d < steps), other=0),)  # type: ignore[assignment]
    total = gl.zeros([SPLITS, rows, BLOCK_M], gl.float32, mma)
    for start in range(0, steps, DEPTH):
        later = ()
        for d in gl.static_range(DEPTH):
            step = start + d
            then = step + DEPTH
            there = (code_step + then < every) & (then < steps)
            later += (gl.load(code_at + then * words, mask=there, other=0),)  # type: ignore[assignment]
            inside = (scale_step + step < every) & (step < steps)
            group_at = scale_row.to(gl.int64) * GROUPS + (scale_step + step) * GROUPS // every
            scale = gl.load(scales + group_at, mask=inside, other=0.0).to(gl.float32)
            if HAS_ZEROS:
                zero = gl.load(zeros + group_at, mask=inside, other=0).to(gl.int16)
            else:
                zero = gl.full([SPLITS, rows], 0, gl.int16, sums)
            zero = zero | (0x6400 if dtype == gl.float16 else 0x4300)
            zero, code = gl.broadcast(
                gl.expand_dims(gl.convert_layout(zero, gl.SliceLayout(2, code_layout)), 2), held[d]
            )
            taken = gl.load(input_at + step * width, mask=(input_step + step < every) & (step < steps), other=0.0)
            w0, w1, w2, w3 = _widen(code, zero, dtype)
            x0, x1, x2, x3 = _quarters(taken)
            part = gl.zeros([SPLITS, rows, BLOCK_M], gl.float32, mma)
            part = mma_v2(gl.convert_layout(w0, left), gl.convert_layout(x0, right), part)
            part = mma_v2(gl.convert_layout(w1, left), gl.convert_layout(x1, right), part)
            part = mma_v2(gl.convert_layout(w2, left), gl.convert_layout(x2, right), part)
            part = mma_v2(gl.convert_layout(w3, left), gl.convert_layout(x3, right), part)
            total += part * gl.expand_dims(scale, 2)
        held = later

    result = gl.sum(total, 0)  # [rows, BLOCK_M]
    other = result
    if GATE:
        result, other = gl.split(gl.permute(gl.reshape(result, [2, own, BLOCK_M]), (1, 2, 0)))
    at_n = first + gl.arange(0, own, gl.SliceLayout(1, result.type.layout))
    at_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, result.type.layout)), 0)
    if HAS_FACTORS:
        result *= gl.expand_dims(gl.load(factors + at_n), 1)
    if HAS_BIAS:
        result += gl.expand_dims(gl.load(bias + at_n).to(gl.float32), 1)
    if GATE:
        if HAS_FACTORS:
            other *= gl.expand_dims(gl.load(factors + N + at_n), 1)
        if HAS_BIAS:
            other += gl.expand_dims(gl.load(bias + N + at_n).to(gl.float32), 1)
        inner = result
        if GATE == 2:
            # 0.5 (1 + tanh z) = sigmoid(2 z)
            inner = 1.5957691216057308 * (result + 0.044715 * result * result * result)
        result = result / (1.0 + gl.exp(-inner)) * other
    place = at_m * N + gl.expand_dims(at_n, 1)
    if ADDS:
        result += gl.load(residual + place, mask=at_m < M, other=0.0).to(gl.float32)
    gl.store(out + place, result.to(out.dtype.element_ty), mask=at_m < M)


def block_shape(count: int, rows: int, columns: int, *, gated: bool) -> tuple[int, int, int, int]:
    """A program's shares of the inputs, its warps and tiles of 16 rows, and the steps whose codes are under way.

    Measured for 1 and 8 rows in an 8B model's shapes on an H200.
    """
    if gated or (count > 1 and rows >= 16384):
        return (2, 2, 2, 4) if rows >= 16384 else (4, 1, 2, 2)
    splits = 8 if columns >= 8192 or rows <= 4096 else 4
    if count > 1:
        return splits, 1, splits // 4, 2
    return splits, 1, 1, 2 if columns >= 8192 or rows > 8192 else 4


def serves(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    """Whether it is 4 bits without a table or mins, in groups of whole steps, and activations are of 16 bits."""
    whole = weight.columns % _STEP == 0 and weight.rows % _WHOLE == 0
    groups = weight.scales.shape[1] == 1 or (weight.group % _STEP == 0 and weight.columns % weight.group == 0)
    return (
        weight.bits == 4
        and weight.table is None
        and weight.mins is None
        and whole
        and groups
        and dtype in (torch.bfloat16, torch.float16)
    )


def few_rows(
    x: Tensor,
    weight: GroupedWeight,
    *,
    bias: Tensor | None = None,
    norm: None = None,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``gate(x @ weight.T + bias) + add_to`` for at most :data:`MOST` rows.

    Args:
        x: [T, K], of 16 bits; rows may lie apart.
        weight: One that :func:`serves`.
        bias: [N].
        norm: None is taken along.
        gate: A gated activation of the product; its first half is the gate.
        add_to: [T, N] or [T, N / 2], contiguous; becomes the sum.
        dtype: The result's; None: x's.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    count, rows = x.shape[0], weight.rows // (1 if gate is None else 2)
    out = torch.empty(count, rows, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    splits, wide, tall, depth = block_shape(count, weight.rows, weight.columns, gated=gate is not None)
    block_m = 8 if count <= 8 else MOST
    own = 16 * wide * tall // (1 if gate is None else 2)
    _few_kernel[(rows // own,)](
        x, weight.codes.view(torch.uint16), weight.scales, x if weight.zeros is None else weight.zeros,
        x if weight.factors is None else weight.factors, x if bias is None else bias, out, out, count, x.stride(0), rows,
        weight.columns, weight.scales.shape[1], HAS_ZEROS=weight.zeros is not None, HAS_FACTORS=weight.factors is not None,
        HAS_BIAS=bias is not None, ADDS=add_to is not None, GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate], SPLITS=splits,
        WIDE=wide, TALL=tall, DEPTH=depth, BLOCK_M=block_m, num_warps=splits * wide,
    )  # fmt: skip
    return out
