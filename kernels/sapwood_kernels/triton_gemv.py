"""Triton: a linear layer on one row, in one kernel with the norm before it and the gate or the sum after it.

At batch 1 a decode step is bound by reading every weight once: many bytes in flight and few kernels make it fast. Each
program takes ``BLOCK_N`` rows of the weight and streams them past the input vector, with products and sums in float32; a tile's
weights are under way while those before are multiplied, and the first ones before the kernel ahead has ended
(``dependent_launch``). The norm costs nothing extra: ``W (x * w / rms) = (W (x * w)) / rms``, and each program reads all of x, so
it knows the rms.

Bound: one read of the weight. O(N K).
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch

Gate = Literal["silu", "gelu_tanh"]


@triton.jit
def _weights(weight, first, valid, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_K] of the weight, whose rows begin at ``first``; zeros beyond its end."""
    columns = start + tl.arange(0, BLOCK_K)
    return tl.load(weight + first[:, None] + columns[None, :], mask=valid[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def _gemv_kernel(
    x, weight, scales, norm, bias, residual, out, eps, scale_stride, N: tl.constexpr, K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATE: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    first = rows.to(tl.int64) * K
    part = _weights(weight, first, valid, 0, K, BLOCK_K)
    part_up = part
    if GATE != 0:
        part_up = _weights(weight + N * K, first, valid, 0, K, BLOCK_K)
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        inside = columns < K
        values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += values * values
            values *= tl.load(norm + columns, mask=inside, other=0.0)
        here, here_up = part, part_up
        if start + BLOCK_K < K:
            part = _weights(weight, first, valid, start + BLOCK_K, K, BLOCK_K)
            if GATE != 0:
                part_up = _weights(weight + N * K, first, valid, start + BLOCK_K, K, BLOCK_K)
        taken = values
        if SCALED == 2:  # by block of 128 x 128, and BLOCK_N divides 128
            block = scales + tl.program_id(0) * BLOCK_N // 128 * scale_stride
            taken = values * tl.load(block + columns // 128, mask=inside, other=0.0)
        total += here.to(tl.float32) * taken[None, :]
        if GATE != 0:
            if SCALED == 2:
                block += N // 128 * scale_stride
                taken = values * tl.load(block + columns // 128, mask=inside, other=0.0)
            total_up += here_up.to(tl.float32) * taken[None, :]
    result = tl.sum(total, axis=1)
    if SCALED == 1:
        result *= tl.load(scales + rows, mask=valid, other=0.0)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        result *= scale
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    if GATE != 0:
        up = tl.sum(total_up, axis=1) * scale
        if SCALED == 1:
            up *= tl.load(scales + N + rows, mask=valid, other=0.0)
        if HAS_BIAS:
            up += tl.load(bias + N + rows, mask=valid, other=0.0).to(tl.float32)
        if GATE == 1:
            result = result * tl.sigmoid(result) * up
        else:
            inner = 0.7978845608028654 * (result + 0.044715 * result * result * result)
            result = result * tl.sigmoid(2.0 * inner) * up  # 0.5 (1 + tanh z) = sigmoid(2 z)
    if ADDS:
        result += tl.load(residual + rows, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=valid)


TILES = {
    (7168, 8192): (1, 512, 2), (8192, 7168): (4, 1024, 4), (2560, 8192): (1, 1024, 2), (8192, 2048): (4, 512, 1),
    (32064, 8192): (2, 512, 2), (4096, 14336): (2, 2048, 4), (4096, 4096): (4, 1024, 2), (128256, 4096): (1, 2048, 4),
    (2048, 4096): (2, 2048, 4),
}  # fmt: skip
"""Outputs and inputs of a product with 16-bit weights, without a norm -> its tile: the fastest of 20 to 40 on an H200
(``benchmarks/gpu/bench_one_row.py``), for a fourth of a 70B of Llama's shape and for an 8B, and on an H100 for Qwen3-30B-A3B."""
NORMED_TILES = {(5120, 2048): (4, 1024, 4), (3648, 2048): (4, 1024, 4), (102400, 2048): (4, 1024, 4)}
"""Outputs and inputs of a product with a norm before it -> its tile, found likewise; the last two, of twelve and of seven on an
H200, are DeepSeek-V2-Lite's: 4.8 us for 5.6, and 96.6 for 97.9."""


def block_shape(rows: int, width: int, *, plain: bool, normed: bool = False) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps.

    Args:
        rows: Outputs.
        width: Inputs.
        plain: Whether weights are 16-bit and no norm comes first. Each program reads all of a norm, so that with one it has more
            rows; a tile of a gate's 2 x 4 x 4096 numbers would not fit the registers.
        normed: Whether weights are 16-bit, a norm comes first and no gate after it.
    """
    known = TILES if plain else NORMED_TILES if normed else {}
    if (rows, width) in known:
        return known[rows, width]
    if plain and width > 4096:
        return 2, 1024, 4
    if 4096 < width <= 8192:
        return 4, 2048, 8
    columns = min(triton.next_power_of_2(width), 4096)
    if columns <= 1024:
        return (8, columns, 8) if rows > 32768 else (2, columns, 2)
    return 4, columns, 8 if rows <= 4096 else 4


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    blocks: tuple[int, int, int] | None = None,
) -> Tensor:
    """``gate(norm(x) @ weight.T + bias) + add_to`` for a single row.

    Args:
        x: [1, K], contiguous.
        weight: [N, K], contiguous; [2N, K] with a gate: gate first, then up.
        scales: float32, of a float8 weight: [N, 1], or [N / 128, K / 128] by block; with a gate for 2N rows.
        bias: [N] or [2N].
        norm: Norms x before the product (RMSNorm): the norm's weight, float32 [K], and eps.
        gate: The activation, for ``activation(first half) * second half``.
        add_to: [1, N]: the result is added to it in place, and it is returned.
        dtype: The result's dtype; x's if not given.
        blocks: The tile, as :func:`block_shape` gives it.

    Returns:
        [1, N].
    """
    width = x.shape[1]
    rows = weight.shape[0] // (1 if gate is None else 2)
    out = torch.empty((1, rows), dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    block_n, block_k, warps = blocks or block_shape(
        rows, width, plain=norm is None and scales is None, normed=norm is not None and scales is None and gate is None
    )
    scaled = 0 if scales is None else 1 if scales.shape[0] == weight.shape[0] else 2
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    _gemv_kernel[(triton.cdiv(rows, block_n),)](
        x, weight, x if scales is None else scales, norm_weight, x if bias is None else bias,
        x if add_to is None else add_to, out, eps, 0 if scales is None else scales.stride(0), rows, width,
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, ADDS=add_to is not None,
        GATE={None: 0, "silu": 1, "gelu_tanh": 2}[gate], SCALED=scaled, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, **dependent_launch.options(x),
    )  # fmt: skip
    return out
