"""Triton: activations to int8 by a scale for each row, after a norm or an MLP's gate if wanted, and products of int8 numbers,
scaled and added to a residual as they leave.

Bound of the first: reads the row once, writes a byte for each number. The second's is the tensor cores'; sums are exact in int32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.quantised.triton_row import Gate

_LARGEST = tl.constexpr(127.0)
_TINY = tl.constexpr(1e-12)
_GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}


@triton.jit
def _gated(gate, up, GATE: tl.constexpr):
    """The activation of ``gate``, times ``up``: SiLU, or for 2 GELU by tanh."""
    inner = gate
    if GATE == 2:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 0.5 (1 + tanh z) = sigmoid(2 z)
    return gate * tl.sigmoid(inner) * up


@triton.jit
def _sum_and_largest(sum_a, largest_a, sum_b, largest_b):
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


@triton.jit
def _quantise_kernel(
    x, weight, out, scales, eps, x_stride, N: tl.constexpr, HAS_NORM: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:  # both are known at once: programs wait for each other's warps once less
        weighted = values * tl.load(weight + at, mask=inside, other=0.0)
        squares, largest = tl.reduce((values * values, tl.abs(weighted)), 0, _sum_and_largest)
        factor = tl.rsqrt(squares / N + eps)
        values, largest = weighted * factor, largest * factor
    if GATE != 0:
        up = tl.load(x + row * x_stride + N + at, mask=inside, other=0.0).to(tl.float32)
        values = _gated(values, up, GATE)
    if not HAS_NORM:
        largest = tl.max(tl.abs(values), axis=0)
    scale = tl.maximum(largest / _LARGEST, _TINY)
    tl.store(scales + row, scale)
    values = values / scale
    rounded = tl.floor(tl.abs(values) + 0.5)
    tl.store(out + row * N + at, tl.where(values < 0, -rounded, rounded).to(tl.int8), mask=inside)


@triton.jit
def _product_kernel(
    x, x_scales, weight, scales, out, M, N, K: tl.constexpr, EVEN: tl.constexpr, ADDS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # N outputs; a tile has BLOCK_N of them; with a gate as many rows of the weight again, so that it has half of its columns of
    # either. TOGETHER rows of tiles at a time, so that what a wave of programs reads stays in the L2 cache.
    wide: tl.constexpr = BLOCK_N // 2 if GATE != 0 else BLOCK_N
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, wide)
    band = tl.program_id(0) // (TOGETHER * across)
    high = min(down - band * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * across)
    at_m = (band * TOGETHER + within % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    each = tl.arange(0, BLOCK_N)
    # Rows beyond the last are read, not written.
    read_m = (at_m % M).to(tl.int64)
    read_n = ((within // high * wide + each % wide) % N + each // wide * N).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        if EVEN:
            one = tl.load(x + read_m[:, None] * K + column[None, :])
            other = tl.load(weight + read_n[None, :] * K + column[:, None])
        else:
            one = tl.load(x + read_m[:, None] * K + column[None, :], mask=(column < K)[None, :], other=0)
            other = tl.load(weight + read_n[None, :] * K + column[:, None], mask=(column < K)[:, None], other=0)
        total = tl.dot(one, other, total, out_dtype=tl.int32)
    own = tl.load(x_scales + at_m, mask=at_m < M, other=0.0)
    result = total.to(tl.float32) * own[:, None] * tl.load(scales + read_n)[None, :]
    if GATE != 0:
        result, up = tl.split(tl.permute(tl.reshape(result, (BLOCK_M, 2, wide)), (0, 2, 1)))
        result = _gated(result, up, GATE)
    at_n = within // high * wide + tl.arange(0, wide)
    inside = (at_m < M)[:, None] & (at_n < N)[None, :]
    target = out + at_m.to(tl.int64)[:, None] * N + at_n[None, :]
    if ADDS:
        result += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def quantise_rows(
    x: Tensor, *, norm: tuple[Tensor, float] | None = None, gate: Gate | None = None
) -> tuple[Tensor, Tensor]:
    """Computes ``int8.quantise_rows``, halves rounded away from zero, of the normed or gated input.

    Args:
        x: [T, K], or [T, 2 K] with ``gate``, with contiguous rows.
        norm: An RMSNorm's weight, float32 [K], and eps.
        gate: A gated activation.
    """
    rows, width = x.shape[0], x.shape[1] // (1 if gate is None else 2)
    out = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantise_kernel[(rows,)](
        x, x if norm is None else norm[0], out, scales, 0.0 if norm is None else norm[1], x.stride(0), N=width,
        HAS_NORM=norm is not None, GATE=_GATES[gate], BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out, scales


def block_shape(count: int, rows: int, processors: int) -> tuple[int, int, int, int, int]:
    """Tile of a product of ``count`` rows with a weight of ``rows``: its rows, columns and depth, warps and stages."""
    tall = 16 if count <= 16 else 32 if count <= 32 else 64 if count <= 64 else 128
    wide = 128
    while wide > 16 and -(-rows // wide) * -(-count // tall) < processors:
        wide //= 2
    return tall, wide, 128, 4, 3 if tall == 128 else 4


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    processors: int,
    blocks: tuple[int, int, int, int, int] | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    gate_after: Gate | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Computes ``int8.product`` of the normed or gated input: weight int8 [N, K], scales float32 [N, 1] -> [T, N].

    What MLPs compute ahead of their second product is half as wide gated here, and is written and read once less.

    Args:
        x, norm, gate: As for :func:`quantise_rows`.
        weight: Contiguous.
        scales: Contiguous.
        processors: The device's: programs that run at once.
        blocks: The tile, as :func:`block_shape` gives it.
        gate_after: A gated activation of the result, whose first half is the gate: [T, N / 2].
        add_to: [T, N], contiguous; becomes the sum, which is returned.
    """
    codes, own = quantise_rows(x, norm=norm, gate=gate)
    tile = blocks or block_shape(len(codes), len(weight), processors)
    return multiply(codes, own, weight, scales, x.dtype, tile, gate=gate_after, add_to=add_to)


def multiply(
    codes: Tensor,
    own: Tensor,
    weight: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    tile: tuple[int, int, int, int, int],
    *,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """The product of what :func:`quantise_rows` gave, int8 [T, K] and float32 [T, 1].

    Args:
        codes, own: Contiguous.
        weight, scales, add_to: As for :func:`product`.
        dtype: The result's.
        tile: As :func:`block_shape` gives it.
        gate: ``gate_after`` of :func:`product`.
    """
    (count, width), rows = codes.shape, len(weight) // (1 if gate is None else 2)
    out = torch.empty(count, rows, dtype=dtype, device=codes.device) if add_to is None else add_to
    block_m, block_n, block_k, warps, stages = tile
    _product_kernel[(triton.cdiv(count, block_m) * triton.cdiv(len(weight), block_n),)](
        codes, own, weight, scales, out, count, rows, width, EVEN=width % block_k == 0, ADDS=add_to is not None,
        GATE=_GATES[gate], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, TOGETHER=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
