"""Gluon: a linear layer on one row with a weight in 4-bit groups of 128, in one kernel with the norm before and the gate or sum
after.

The row becomes whole numbers of 23 bits of its largest, in three digits of 8 bits, and tensor cores multiply codes by digits as
bytes: a digit in each column, exact sums. Eight codes are made bytes by three operations, where 16-bit floats would take eleven.
Sums of a group are scaled in float32, and less its zero times the sum of its inputs.

Codes go from memory to the registers of tensor cores as they lie there. Each program makes the digits for itself, in shared
memory. It asks for its first codes before it waits for the kernel ahead of it, which need not have ended (programmatic dependent
launch): so the memory does not idle between the products of a step. Codes, which are read once a step, are the first to leave the
L2 cache.

Bound: one read of codes, zeros and scales. O(N K).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels.quantised import triton_few, triton_one_wide
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.quantised.triton_few import Gate, bits
from sapwood_kernels.quantised.triton_one_ends import scale_layout, store_output

_PAIR = 256  # inputs of two groups, which a warp takes after each other
_MOST_PAIRS = 8  # of a warp: the kernel has code for each
_MOST_COLUMNS = 8192

# Triton 3.6 and later ones name it differently.
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _seen(kept, shape: gl.constexpr, layout: gl.constexpr):
        return kept.reinterpret(kept.dtype, shape, layout)
else:

    @gluon.jit
    def _seen(kept, shape: gl.constexpr, layout: gl.constexpr):
        return kept._reinterpret(kept.dtype, shape, layout)


_HALVES = gl.constexpr("""{
    .reg .b32 t;
    shr.u32 t, $2, 4;
    and.b32 $0, $2, 0x0f0f0f0f;
    and.b32 $1, t, 0x0f0f0f0f;
}""")
_BYTES = gl.constexpr((gl.int8, gl.int8))
_DIGITS = gl.constexpr("""{
    .reg .b32 s, t;
    prmt.b32 s, $4, $5, 0x5140;
    prmt.b32 t, $6, $7, 0x5140;
    prmt.b32 $0, s, t, 0x5410;
    prmt.b32 $1, s, t, 0x7632;
    prmt.b32 s, $4, $5, 0x0062;
    prmt.b32 t, $6, $7, 0x0062;
    prmt.b32 $2, s, t, 0x5410;
    xor.b32 $0, $0, 0x80808080;
    xor.b32 $1, $1, 0x80808080;
    xor.b32 $2, $2, 0x80808080;
    mov.b32 $3, 0;
}""")
_FOUR_BYTES = gl.constexpr((gl.int8,) * 4)


@gluon.jit
def _halves(codes):
    """The low and the high halves of bytes."""
    low, high = gl.inline_asm_elementwise(_HALVES, "=&r,=&r,r", [codes], _BYTES, is_pure=True, pack=4)
    return low, high


@gluon.jit
def _larger(one, other):
    return gl.maximum(one, other)


@gluon.jit
def _digits_of(words):
    """The three digits of each word, which are its low bytes less 0x80, and nothing."""
    one, two, three, none = gl.inline_asm_elementwise(
        _DIGITS, "=&r,=&r,=&r,=&r,r,r,r,r", [words], _FOUR_BYTES, is_pure=True, pack=4
    )
    return gl.join(gl.join(one, three), gl.join(two, none))


@gluon.jit
def _held(codes, scales, zeros, code_at, value_at, pair, SHARES: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """The codes, scales and zeros of two groups."""
    first = gl.load(codes + (code_at + pair * (SHARES * 128)), eviction_policy="evict_first")
    second = gl.load(codes + (code_at + (pair * (SHARES * 128) + 64)), eviction_policy="evict_first")
    scale = gl.load(scales + (value_at + pair * (SHARES * 2)))
    zero = scale
    if HAS_ZEROS:
        zero = gl.load(zeros + (value_at + pair * (SHARES * 2)))
    return first, second, scale, zero


@gluon.jit
def _digits(kept, half: gl.constexpr, like, EVERY: gl.constexpr, RIGHT: gl.constexpr):
    """The digits of a group's even or odd inputs [SHARES, 64, 8] as a product's right side: four columns twice."""
    four = kept.slice(64 * half, 64, 2).permute((1, 2, 0)).load(gl.SliceLayout(2, EVERY))
    both, _ = gl.broadcast(gl.expand_dims(four, 2), like)
    return gl.convert_layout(gl.reshape(both, [both.shape[0], 64, 8]), RIGHT)


# Layouts are made inside the kernel: what is noted to be compiled elsewhere is described in JSON, which has none.
@gluon.constexpr_function
def _code_layout(shares, wide, tall):
    """Which thread holds which codes [shares, rows, 64 bytes]: as tensor cores take them."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0], *[[0, 16 * wide << b, 0] for b in bits(tall)]
        ],
        lane_bases=[[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[*[[0, 16 << b, 0] for b in bits(wide)], *[[1 << b, 0, 0] for b in bits(shares)]],
        block_bases=[],
        shape=[shares, 16 * wide * tall, 64],
    )  # fmt: skip


@gluon.constexpr_function
def _digit_layout(shares, wide):
    """Which thread holds which digits [shares, 64 inputs, twice, 4]: as tensor cores take them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0], [0, 8, 0, 0]],
        lane_bases=[[0, 16, 0, 0], [0, 32, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0]],
        warp_bases=[*[[0, 0, 0, 0] for _ in bits(wide)], *[[1 << b, 0, 0, 0] for b in bits(shares)]],
        block_bases=[],
        shape=[shares, 64, 2, 4],
    )


@gluon.jit
def _one_kernel(
    x, codes, scales, zeros, factors, norm, bias, residual, out, eps, N: gl.constexpr, K: gl.constexpr,
    HAS_ZEROS: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, ADDS: gl.constexpr,
    GATE: gl.constexpr, SHARES: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr,
    DEPTH: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    # Tensors are [SHARES, rows of the weight, inputs]: a warp has one of SHARES of the pairs of groups, every SHARES-th.
    code_layout: gl.constexpr = _code_layout(SHARES, WIDE, TALL)
    value_layout: gl.constexpr = scale_layout(SHARES, WIDE, TALL)
    digit_layout: gl.constexpr = _digit_layout(SHARES, WIDE)
    input_layout: gl.constexpr = gl.BlockedLayout([8], [32], [SHARES * WIDE], [0])
    rows: gl.constexpr = 16 * WIDE * TALL
    own: gl.constexpr = rows // 2 if GATE else rows  # outputs of this program; with a gate it has twice as many rows
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SHARES, WIDE, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    sums: gl.constexpr = gl.SliceLayout(2, mma)
    pairs: gl.constexpr = K // (256 * SHARES)

    gdc_launch_dependents()
    first = gl.program_id(0) * own
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(2, code_layout)))
    row = gl.expand_dims(gl.expand_dims(first + row % own + row // own * N, 0), 2)
    share = gl.expand_dims(
        gl.expand_dims(gl.arange(0, SHARES, gl.SliceLayout(1, gl.SliceLayout(2, code_layout))), 1), 2
    )
    byte = gl.expand_dims(gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, code_layout))), 0), 1)
    code_at = row.to(gl.int64) * (K // 2) + share * 128 + byte
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(2, value_layout)))
    row = gl.expand_dims(gl.expand_dims(first + row % own + row // own * N, 0), 2)
    share = gl.expand_dims(
        gl.expand_dims(gl.arange(0, SHARES, gl.SliceLayout(1, gl.SliceLayout(2, value_layout))), 1), 2
    )
    half = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, value_layout))), 0), 1)
    value_at = row * (K // 128) + share * 2 + half
    held = ()  # of the next DEPTH pairs, which are under way
    for pair in gl.static_range(DEPTH):
        held += (_held(codes, scales, zeros, code_at, value_at, pair, SHARES, HAS_ZEROS),)  # type: ignore[assignment]
    column = gl.arange(0, 256 * SHARES * PARTS, input_layout)
    inside = column < K
    if HAS_NORM:
        each_weight = gl.load(norm + column, mask=inside, other=0.0)

    gdc_wait()
    row = gl.load(x + column, mask=inside, other=0.0).to(gl.float32)
    if HAS_NORM:
        factor = gl.rsqrt(gl.sum(row * row, 0) / K + eps)
        row *= each_weight
    else:
        factor = 1.0
    # As whole numbers sizes are in the same order, and what is not a number is the largest.
    largest = gl.reduce(row.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0, _larger)
    unit = gl.maximum(largest, 0x0DA24260).to(gl.float32, bitcast=True) * (1.0 / 4194302.0)
    factor *= unit
    # A float32 from 1.5 * 2^23 on has whole numbers n in its low bits, whose digits are the bytes of n + 0x808080 less 0x80.
    words = (row * (1.0 / unit) + 12582912.0).to(gl.int32, bitcast=True) - (0x4B400000 - 0x808080)
    even, odd = gl.split(gl.reshape(words, [PARTS, SHARES, 128, 2]))
    every = gl.join(_digits_of(even), _digits_of(odd))  # [PARTS, SHARES, 128, half of the digit, the other half, odd]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(gl.int8, [8 * PARTS * SHARES, 128], flat)
    kept.store(gl.reshape(gl.permute(every, (0, 5, 3, 4, 1, 2)), [8 * PARTS * SHARES, 128]))
    digits = _seen(kept, [2 * PARTS, 4, SHARES, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    if HAS_ZEROS:
        kept_sums = gl.allocate_shared_memory(gl.int32, [PARTS * SHARES * 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        kept_sums.store(gl.sum(gl.reshape(words, [PARTS * SHARES * 2, 128]), 1) - 128 * 0x808080)
        totals = _seen(kept_sums, [PARTS, SHARES, 2], flat)
    _together()

    like = gl.zeros([SHARES, 64, 2, 4], gl.int8, digit_layout)
    total = gl.zeros([SHARES, rows, 8], gl.float32, mma)
    less = gl.zeros([SHARES, rows], gl.float32, sums)
    for pair in gl.static_range(pairs):
        if pair + DEPTH < pairs:
            held += (_held(codes, scales, zeros, code_at, value_at, pair + DEPTH, SHARES, HAS_ZEROS),)  # type: ignore[assignment]
        each_scale = gl.split(held[pair][2])
        each_zero = gl.split(held[pair][3])
        for half in gl.static_range(2):
            low, high = _halves(held[pair][half])
            # Sums are whole numbers in the low bits of such a float, too: less than 2^22 from 1.5 * 2^23.
            part = gl.full([SHARES, rows, 8], 0x4B400000, gl.int32, mma)
            even = _digits(digits.index(2 * pair), half, like, digit_layout, right)
            part = mma_v2(gl.convert_layout(low, left), even, part)
            odd = _digits(digits.index(2 * pair + 1), half, like, digit_layout, right)
            part = mma_v2(gl.convert_layout(high, left), odd, part)
            scale = gl.convert_layout(each_scale[half], sums).to(gl.float32)
            total += (part.to(gl.float32, bitcast=True) - 12582912.0) * gl.expand_dims(scale, 2)
            if HAS_ZEROS:
                zero = gl.convert_layout(each_zero[half], sums).to(gl.float32)
                inner = totals.index(pair).slice(half, 1, 1).load(gl.SliceLayout(2, mma)).to(gl.float32)
                inner, _ = gl.broadcast(inner, zero)
                less += zero * scale * inner

    # A column's digit is worth 1, 256 or 65536; the others hold nothing.
    digit = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    worth = gl.where(digit == 0, 1.0, gl.where(digit == 1, 256.0, gl.where(digit == 2, 65536.0, 0.0)))
    total *= gl.expand_dims(gl.expand_dims(worth, 0), 1)
    result = gl.sum(gl.sum(total, 2) - less, 0) * factor  # [rows]
    store_output(
        result,
        first,
        factors,
        bias,
        residual,
        out,
        N=N,
        OWN=own,
        HAS_FACTORS=HAS_FACTORS,
        HAS_BIAS=HAS_BIAS,
        ADDS=ADDS,
        GATE=GATE,
    )


class Blocks(NamedTuple):
    """What a program takes.

    Attributes:
        shares: Warps that share the inputs.
        wide: Warps next to each other, on rows of their own.
        tall: Tiles of 16 rows of a warp; at least 2 with a gate.
        depth: Pairs of groups whose codes are under way.
    """

    shares: int
    wide: int
    tall: int
    depth: int


def block_shape(rows: int, columns: int, *, gated: bool) -> Blocks | None:
    """The block of a program; None: the inputs cannot be divided into equal shares.

    Measured for an 8B model's shapes on an H200.
    """
    for shares in (8, 4, 2, 16, 1) if gated or rows > 8192 else (4, 8, 2, 16, 1):
        pairs = columns // (_PAIR * shares)
        if columns % (_PAIR * shares) == 0 and pairs <= _MOST_PAIRS:
            return Blocks(shares, 1, 2 if gated else 1, min(2 if gated else 4, pairs))
    return None


def serves(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    """Whether it is 4 bits without a table, in groups of 128 that make whole shares, and activations are of 16 bits."""
    if not triton_few.serves(weight, dtype) or weight.scales.shape[1] * 128 != weight.columns:
        return False
    return block_shape(weight.rows, weight.columns, gated=False) is not None


def one_row(
    x: Tensor,
    weight: GroupedWeight,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """``gate(norm(x) @ weight.T + bias) + add_to`` for a single row; arguments as for ``triton_row.row_product``, ``weight`` one
    that :func:`serves`. Rows of more inputs are left to ``triton_one_wide``, unless ``blocks`` are given."""
    if weight.columns > _MOST_COLUMNS and blocks is None:
        return triton_one_wide.one_row(x, weight, bias=bias, norm=norm, gate=gate, add_to=add_to, dtype=dtype)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
        norm = None if norm is None else (norm[0][weight.order], norm[1])
    rows = weight.rows // (1 if gate is None else 2)
    out = torch.empty(1, rows, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    blocks = blocks or block_shape(weight.rows, weight.columns, gated=gate is not None)
    assert blocks is not None
    shares, wide, tall, depth = blocks
    norm_weight, eps = norm or (x, 0.0)
    _one_kernel[(rows // (16 * wide * tall // (1 if gate is None else 2)),)](
        x, weight.codes, weight.scales, x if weight.zeros is None else weight.zeros,
        x if weight.factors is None else weight.factors, norm_weight, x if bias is None else bias, out, out, eps, rows,
        weight.columns, HAS_ZEROS=weight.zeros is not None, HAS_FACTORS=weight.factors is not None, HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None, ADDS=add_to is not None, GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate], SHARES=shares,
        WIDE=wide, TALL=tall, DEPTH=depth, PARTS=triton.next_power_of_2(weight.columns // (_PAIR * shares)),
        num_warps=shares * wide, launch_pdl=True,
    )  # fmt: skip
    return out
