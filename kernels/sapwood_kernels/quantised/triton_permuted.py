"""Triton: rows in the order in which ``triton_many`` multiplies them, after a norm or an MLP's gate if wanted.

Bound: reads the rows once, writes them once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.quantised.triton_int8 import _GATES, _gated
from sapwood_kernels.quantised.triton_row import Gate

_PART = 2048  # numbers of a row that a program takes where it need not know all of them


@triton.jit(do_not_specialize=["x_stride", "count"])
def _permute_kernel(
    x, order, norm, out, cleared, eps, x_stride, count, K: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_NORM: tl.constexpr,
    GATE: tl.constexpr, BLOCK: tl.constexpr, CLEARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    within = at % 128
    # Column 32 i + 8 j + 2 t + b of a group is input 32 t + 8 j + 4 b + i.
    source = at - within + within // 2 % 4 * 32 + within // 8 % 4 * 8 + within % 2 * 4 + within // 32
    if HAS_ORDER:
        source = tl.load(order + source, mask=inside, other=0)
    if PDL:
        gdc_wait()
    if CLEARED != 0 and tl.program_id(0) + tl.program_id(1) == 0:
        each = tl.arange(0, CLEARED)
        tl.store(cleared + each, each * 0, mask=each < count)
    values = tl.load(x + row * x_stride + source, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        values *= tl.rsqrt(tl.sum(values * values, axis=0) / K + eps) * tl.load(norm + source, mask=inside, other=0.0)
    if GATE != 0:
        up = tl.load(x + row * x_stride + K + source, mask=inside, other=0.0).to(tl.float32)
        values = _gated(values, up, GATE)
    tl.store(out + row * K + at, values.to(out.dtype.element_ty), mask=inside)


def permuted(
    x: Tensor,
    cleared: Tensor | None = None,
    *,
    order: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    most: int = dependent_launch.MOST_ROWS,
) -> Tensor:
    """``gate(norm(x))`` with each group of 128 numbers in the order in which a thread that holds their codes multiplies them.

    Args:
        x: [T, K], K a multiple of 128; [T, 2 K] with ``gate``; rows may lie apart.
        cleared: int32 [C]: becomes zeros.
        order: int64 [K]: which input comes first, second, ... before groups are made.
        norm: An RMSNorm's weight, float32 [K], and eps.
        gate: A gated activation.
        most: Rows up to which it begins before the kernel ahead has ended.

    Returns:
        [T, K].
    """
    width = x.shape[1] // (1 if gate is None else 2)
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    block = _PART if norm is None else triton.next_power_of_2(width)
    weight, eps = norm or (x, 0.0)
    _permute_kernel[(len(x), triton.cdiv(width, block))](
        x, x if order is None else order, weight, out, x if cleared is None else cleared, eps, x.stride(0),
        0 if cleared is None else len(cleared), width, HAS_ORDER=order is not None, HAS_NORM=norm is not None,
        GATE=_GATES[gate], BLOCK=block, CLEARED=0 if cleared is None else triton.next_power_of_2(len(cleared)),
        num_warps=min(max(block // 512, 1), 16), **dependent_launch.options(x, most),
    )  # fmt: skip
    return out
