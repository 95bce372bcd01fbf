"""Gluon: the common part of gemv kernels with 4-bit groups of 128: where scales lie, and how sums are finished."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sapwood_kernels.quantised.triton_few import bits


@gluon.constexpr_function
def scale_layout(shares, wide, tall):
    """Which thread holds which scales [shares, rows, 2]: those of its codes."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], *[[0, 16 * wide << b, 0] for b in bits(tall)]],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[*[[0, 16 << b, 0] for b in bits(wide)], *[[1 << b, 0, 0] for b in bits(shares)]],
        block_bases=[],
        shape=[shares, 16 * wide * tall, 2],
    )


@gluon.jit
def store_output(
    result, first, factors, bias, residual, out, N: gl.constexpr, OWN: gl.constexpr, HAS_FACTORS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ADDS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Scales, biases, gates and adds sums, float32 [rows], and stores the outputs from ``first`` on: OWN of them.

    With a gate rows are twice as many: those before it, then those that it multiplies, N further on.
    """
    other = result
    if GATE:
        result, other = gl.split(gl.permute(gl.reshape(result, [2, OWN]), (1, 0)))
    at_n = first + gl.arange(0, OWN, result.type.layout)
    if HAS_FACTORS:
        result *= gl.load(factors + at_n)
    if HAS_BIAS:
        result += gl.load(bias + at_n).to(gl.float32)
    if GATE:
        if HAS_FACTORS:
            other *= gl.load(factors + (N + at_n))
        if HAS_BIAS:
            other += gl.load(bias + (N + at_n)).to(gl.float32)
        inner = result
        if GATE == 2:
            # 0.5 (1 + tanh z) = sigmoid(2 z)
            inner = 1.5957691216057308 * (result + 0.044715 * result * result * result)
        result = result / (1.0 + gl.exp(-inner)) * other
    if ADDS:
        result += gl.load(residual + at_n).to(gl.float32)
    gl.store(out + at_n, result.to(out.dtype.element_ty))
