"""Triton: RMSNorm, also of a residual after something is added to it. Each program takes a row, with statistics in float32.
Bound: reads and writes each row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / N + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * N + columns, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes ``reference.rms_norm``: ``x`` [T, N] with contiguous rows, ``weight`` float32 [N]."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    _rms_norm_kernel[(rows,)](
        x, weight, out, eps, x.stride(0), N=width, BLOCK=block, num_warps=warps,
        **dependent_launch.options(x, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return out


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, out, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    at = tl.program_id(0).to(tl.int64) * N + columns
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + tl.load(x + at, mask=inside, other=0.0).to(
        tl.float32
    )
    total = total.to(out.dtype.element_ty)  # rounded as in two passes
    tl.store(residual + at, total, mask=inside)
    values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / N + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + at, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds ``x`` [T, N] to ``residual``, in place, both contiguous and of one dtype; :func:`rms_norm` of the result."""
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(rows,)](
        x, residual, weight, out, eps, N=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return out
