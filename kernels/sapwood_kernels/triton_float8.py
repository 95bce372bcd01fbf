"""Triton: quantises activations to float8 with a scale for each row or group, after a norm or an MLP's gate if wanted.

One program takes a row: it has the row in registers when the largest number is known, so nothing is read twice. Bound: reads the
row (or gate and up) once, writes one byte for each number.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128
_LARGEST = tl.constexpr(448.0)
_TINY = tl.constexpr(1e-12)


@triton.jit
def _quantise_kernel(
    x, weight, out, scales, eps, x_stride, scale_stride, N: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:  # RMSNorm
        factor = tl.rsqrt(tl.sum(values * values, axis=0) / N + eps)
        values *= factor * tl.load(weight + at, mask=inside, other=0.0)
    if KIND >= 2:
        up = tl.load(x + row * x_stride + N + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == 2:
            values = values * tl.sigmoid(values) * up
        else:
            inner = 0.7978845608028654 * (values + 0.044715 * values * values * values)
            values = values * tl.sigmoid(2.0 * inner) * up  # 0.5 (1 + tanh z) = sigmoid(2 z)
    if GIVEN:
        values = values / tl.load(scales)
    elif GROUPED:
        groups: tl.constexpr = BLOCK // GROUP
        grouped = tl.reshape(values, (groups, GROUP))
        scale = tl.maximum(tl.max(tl.abs(grouped), axis=1) / _LARGEST, _TINY)
        values = tl.reshape(grouped / scale[:, None], (BLOCK,))
        nth = tl.arange(0, groups)
        tl.store(scales + nth * scale_stride + row, scale, mask=nth < N // GROUP)
    else:
        one = tl.maximum(tl.max(tl.abs(values), axis=0) / _LARGEST, _TINY)
        values = values / one
        tl.store(scales + row, one)
    values = tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST)
    tl.store(out + row * N + at, values.to(out.dtype.element_ty), mask=inside)


def _run(
    x: Tensor, weight: Tensor | None, eps: float, kind: int, *, grouped: bool, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    if kind >= 2:
        width //= 2
    padded = -(-rows // 4) * 4 if grouped else rows
    out = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (width // GROUP, padded) if grouped else (1, rows)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device) if given is None else given
    block = max(GROUP, triton.next_power_of_2(width))
    _quantise_kernel[(rows,)](
        x, x if weight is None else weight, out, scales, eps, x.stride(0), padded, N=width, KIND=kind, GROUPED=grouped,
        GIVEN=given is not None, BLOCK=block, GROUP=GROUP, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out, scales.t()


def quantise(x: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """Rows to float8.

    Args:
        x: [T, K] with contiguous rows; K a multiple of 128 if grouped.
        grouped: Whether each 128 numbers of a row have a scale, not each row.

    Returns:
        float8_e4m3fn [T, K] and scales, float32 [T, 1]. If grouped, both have T rounded up to a multiple of 4, with undefined
        rows beyond T, and the scales are [T, K / 128], column by column in memory, as ``torch._scaled_mm`` wants them.
    """
    return _run(x, None, 0.0, 0, grouped=grouped)


def quantise_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes ``reference.quantise_tensor``; x [T, K] with contiguous rows. Reads x twice: the scale depends on all of it."""
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    return _run(x, None, 0.0, 0, grouped=False, given=(largest / 448.0).clamp_(min=1e-12).view(1, 1))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """Norms rows as ``reference.rms_norm`` does, with a weight float32 [K], and quantises them as :func:`quantise` does."""
    return _run(x, weight, eps, 1, grouped=grouped)


def gated(gate_up: Tensor, gate: Literal["silu", "gelu_tanh"], *, grouped: bool) -> tuple[Tensor, Tensor]:
    """Quantises ``reference.silu_mul`` or ``gelu_tanh_mul`` of its input as :func:`quantise` does: [T, 2K] -> [T, K]."""
    return _run(gate_up, None, 0.0, 2 if gate == "silu" else 3, grouped=grouped)
