"""Gluon: a linear layer on one row of many inputs with a weight in 4-bit groups of 128, in one kernel with the norm before and
the gate or sum after.

Codes are widened and multiplied as in ``triton_few``: to make digits of a long row in each program, as ``triton_one`` does, takes
longer than they save. The row is put into shared memory once a program, in the order in which tensor cores take it. As in
``triton_one``, some work begins before the kernel ahead has ended.

Bound: one read of codes, zeros and scales. O(N K).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.quantised.triton_few import Gate, _code_layout, _widen
from sapwood_kernels.quantised.triton_one_ends import scale_layout, store_output

_PAIR = 256  # inputs of two groups, which a warp takes after each other
_MOST_PAIRS = 8  # of a warp: the kernel has code for each

# Triton 3.6 and later ones name it differently.
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _pair_codes(codes, code_at, pair, SHARES: gl.constexpr):
    """The codes of two groups, four in 16 bits."""
    first = gl.load(codes + (code_at + pair * (SHARES * 64)), eviction_policy="evict_first")
    second = gl.load(codes + (code_at + (pair * (SHARES * 64) + 32)), eviction_policy="evict_first")
    return first, second


@gluon.jit
def _pair_values(values, at, pair, SHARES: gl.constexpr, SUMS: gl.constexpr):
    """The scales or zeros of two groups."""
    one, two = gl.split(gl.load(values + (at + pair * (SHARES * 2))))
    return gl.convert_layout(one, SUMS), gl.convert_layout(two, SUMS)


@gluon.jit
def _taken(kept, at, half: gl.constexpr, like, RIGHT: gl.constexpr):
    """Inputs of a group as all eight columns of a product's right side."""
    one = kept.index(at).slice(32 * half, 32, 1).load(gl.SliceLayout(2, RIGHT))
    every, _ = gl.broadcast(gl.expand_dims(one, 2), like)
    return every


@gluon.jit
def _one_kernel(
    x, codes, scales, zeros, factors, norm, bias, residual, out, eps, N: gl.constexpr, K: gl.constexpr,
    HAS_ZEROS: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, ADDS: gl.constexpr,
    GATE: gl.constexpr, SHARES: gl.constexpr, TALL: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    # Tensors are [SHARES, rows of the weight, inputs]: a warp has one of SHARES of the pairs of groups, every SHARES-th.
    code_layout: gl.constexpr = _code_layout(SHARES, 1, TALL)
    value_layout: gl.constexpr = scale_layout(SHARES, 1, TALL)
    input_layout: gl.constexpr = gl.BlockedLayout([8], [32], [SHARES], [0])
    kept_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows: gl.constexpr = 16 * TALL
    own: gl.constexpr = rows // 2 if GATE else rows  # outputs of this program; with a gate it has twice as many rows
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SHARES, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    sums: gl.constexpr = gl.SliceLayout(2, mma)
    dtype: gl.constexpr = x.dtype.element_ty
    pairs: gl.constexpr = K // (256 * SHARES)
    chunk: gl.constexpr = 256 * SHARES  # inputs that all warps take together

    gdc_launch_dependents()
    first = gl.program_id(0) * own
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(2, code_layout)))
    row = gl.expand_dims(gl.expand_dims(first + row % own + row // own * N, 0), 2)
    share = gl.expand_dims(
        gl.expand_dims(gl.arange(0, SHARES, gl.SliceLayout(1, gl.SliceLayout(2, code_layout))), 1), 2
    )
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, code_layout))), 0), 1)
    code_at = row.to(gl.int64) * (K // 4) + share * 64 + word
    held = ()
    for pair in gl.static_range(DEPTH):
        held += _pair_codes(codes, code_at, pair, SHARES)

    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(2, value_layout)))
    row = gl.expand_dims(gl.expand_dims(first + row % own + row // own * N, 0), 2)
    share = gl.expand_dims(
        gl.expand_dims(gl.arange(0, SHARES, gl.SliceLayout(1, gl.SliceLayout(2, value_layout))), 1), 2
    )
    half = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, value_layout))), 0), 1)
    value_at = row * (K // 128) + share * 2 + half
    each_scale, each_zero = (), ()
    for pair in gl.static_range(pairs):
        each_scale += _pair_values(scales, value_at, pair, SHARES, sums)
    if HAS_ZEROS:
        for pair in gl.static_range(pairs):
            each_zero += _pair_values(zeros, value_at, pair, SHARES, sums)

    gdc_wait()
    kept = gl.allocate_shared_memory(dtype, [pairs * 4, SHARES, 64], kept_layout)
    column = gl.arange(0, chunk, input_layout)
    inputs = ()
    for pair in gl.static_range(pairs):
        inputs += (gl.load(x + (pair * chunk + column)),)  # type: ignore[assignment]
    factor = 1.0
    if HAS_NORM:
        squares = gl.zeros([chunk], gl.float32, input_layout)
        for pair in gl.static_range(pairs):
            squares += inputs[pair].to(gl.float32) * inputs[pair].to(gl.float32)
        factor = gl.rsqrt(gl.sum(squares, 0) / K + eps)
    for pair in gl.static_range(pairs):
        each = inputs[pair]  # type: ignore[var-annotated]
        if HAS_NORM:
            each = (each.to(gl.float32) * gl.load(norm + (pair * chunk + column))).to(dtype)
        # Numbers 4 e + i of a row are number i of the 16 bits e of its codes.
        even, odd = gl.split(gl.reshape(each, [SHARES, 64, 2, 2]))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        kept.index(pair * 4).store(x0)
        kept.index(pair * 4 + 1).store(x1)
        kept.index(pair * 4 + 2).store(x2)
        kept.index(pair * 4 + 3).store(x3)
    _together()

    like = gl.zeros([SHARES, 32, 8], dtype, right)
    total = gl.zeros([SHARES, rows, 8], gl.float32, mma)
    for pair in gl.static_range(pairs):
        if pair + DEPTH < pairs:
            held += _pair_codes(codes, code_at, pair + DEPTH, SHARES)
        for half in gl.static_range(2):
            zero = gl.full([SHARES, rows], 0, gl.int16, sums)
            if HAS_ZEROS:
                zero = each_zero[2 * pair + half].to(gl.int16)
            zero = zero | (0x6400 if dtype == gl.float16 else 0x4300)
            zero = gl.expand_dims(gl.convert_layout(zero, gl.SliceLayout(2, code_layout)), 2)
            zero, code = gl.broadcast(zero, held[2 * pair + half])
            w0, w1, w2, w3 = _widen(code, zero, dtype)
            part = gl.zeros([SHARES, rows, 8], gl.float32, mma)
            part = mma_v2(gl.convert_layout(w0, left), _taken(kept, pair * 4, half, like, right), part)
            part = mma_v2(gl.convert_layout(w1, left), _taken(kept, pair * 4 + 1, half, like, right), part)
            part = mma_v2(gl.convert_layout(w2, left), _taken(kept, pair * 4 + 2, half, like, right), part)
            part = mma_v2(gl.convert_layout(w3, left), _taken(kept, pair * 4 + 3, half, like, right), part)
            total += part * gl.expand_dims(each_scale[2 * pair + half].to(gl.float32), 2)

    result = gl.sum(gl.sum(total, 0), 1) * (factor / 8)  # [rows]: the eight columns are alike
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


def block_shape(columns: int, *, gated: bool) -> tuple[int, int, int] | None:
    """A program's shares of the inputs, tiles of 16 rows, and pairs of groups whose codes are under way; None: no whole shares.

    Measured for an 8B model's 14336 inputs on an H200.
    """
    for shares in (8, 4, 16, 2, 1):
        pairs = columns // (_PAIR * shares)
        if columns % (_PAIR * shares) == 0 and pairs <= _MOST_PAIRS:
            return shares, 2 if gated else 1, min(2, pairs)
    return None


def one_row(
    x: Tensor,
    weight: GroupedWeight,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``gate(norm(x) @ weight.T + bias) + add_to`` for a single row; arguments as for ``triton_row.row_product``, ``weight`` one
    that ``triton_one`` serves."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
        norm = None if norm is None else (norm[0][weight.order], norm[1])
    rows = weight.rows // (1 if gate is None else 2)
    out = torch.empty(1, rows, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    shape = block_shape(weight.columns, gated=gate is not None)
    assert shape is not None
    shares, tall, depth = shape
    norm_weight, eps = norm or (x, 0.0)
    _one_kernel[(rows // (16 * tall // (1 if gate is None else 2)),)](
        x, weight.codes.view(torch.uint16), weight.scales, x if weight.zeros is None else weight.zeros,
        x if weight.factors is None else weight.factors, norm_weight, x if bias is None else bias, out, out, eps, rows,
        weight.columns, HAS_ZEROS=weight.zeros is not None, HAS_FACTORS=weight.factors is not None, HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None, ADDS=add_to is not None, GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate], SHARES=shares,
        TALL=tall, DEPTH=depth, num_warps=shares, launch_pdl=True,
    )  # fmt: skip
    return out
