"""Triton: a norm of groups of numbers, and a gate. A program takes some of a row's groups. Bound: reads and writes each row
once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.state.contracts import GateOrder
from sapwood_kernels.state.triton_math import silu

_TILE = 2048
"""Numbers that a program takes at least, if a row has them: few programs start and end then."""


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, eps, x_stride, gate_stride, gate_part, N: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr,
    WEIGHTS: tl.constexpr, NORM: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    groups = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (groups < GROUPS) & (columns < N)
    values = tl.load(x + row * x_stride + groups * N + columns, mask=inside, other=0.0).to(tl.float32)
    of_gate = (groups // PER) * gate_part + (groups % PER) * N + columns
    opened = tl.load(gate + row * gate_stride + of_gate, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(opened) if SIGMOID else silu(opened)
    if GATE_FIRST:
        values *= opened
    if NORM:
        values *= tl.rsqrt(tl.sum(values * values, axis=1) / N + eps)[:, None]
        values *= tl.load(weight + (groups % WEIGHTS) * N + columns, mask=inside, other=0.0)
    if not GATE_FIRST:
        values *= opened
    tl.store(out + row * (GROUPS * N) + groups * N + columns, values.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    order: GateOrder,
    dtype: torch.dtype,
    *,
    sigmoid: bool = False,
) -> Tensor:
    """Computes ``reference.gated_norm``. The gate may also be [T, parts, D / parts], each part of a row contiguous, where the
    groups are a multiple of the parts."""
    rows, width = x.shape
    size = width // groups
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    parts = gate.shape[1] if gate.ndim == 3 else 1
    block = triton.next_power_of_2(size)
    block_g = min(max(_TILE // block, 1), triton.next_power_of_2(groups))
    _gated_norm_kernel[(rows, triton.cdiv(groups, block_g))](
        x, gate, x if weight is None else weight, out, eps, x.stride(0), gate.stride(0), gate.stride(1), N=size, GROUPS=groups,
        PER=groups // parts, WEIGHTS=1 if weight is None else len(weight) // size, NORM=weight is not None,
        GATE_FIRST=order == "gate first", SIGMOID=sigmoid, BLOCK_G=block_g, BLOCK=block,
        num_warps=min(max(block * block_g // 512, 1), 16), **dependent_launch.options(x),
    )  # fmt: skip
    return out
