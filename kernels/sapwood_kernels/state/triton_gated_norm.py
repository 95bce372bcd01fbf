"""Triton: a norm of groups of numbers, and a gate. A program takes a row's group. Bound: reads and writes each row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.state.contracts import GateOrder
from sapwood_kernels.state.triton_math import silu


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, eps, x_stride, gate_stride, N: tl.constexpr, GROUPS: tl.constexpr, WEIGHTS: tl.constexpr,
    NORM: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    values = tl.load(x + row * x_stride + group * N + columns, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + group * N + columns, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(opened) if SIGMOID else silu(opened)
    if GATE_FIRST:
        values *= opened
    if NORM:
        values *= tl.rsqrt(tl.sum(values * values, axis=0) / N + eps)
        values *= tl.load(weight + (group % WEIGHTS) * N + columns, mask=inside, other=0.0)
    if not GATE_FIRST:
        values *= opened
    tl.store(out + (row * GROUPS + group) * N + columns, values.to(out.dtype.element_ty), mask=inside)


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
    """Computes ``reference.gated_norm``."""
    rows, width = x.shape
    size = width // groups
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _gated_norm_kernel[(rows, groups)](
        x, gate, x if weight is None else weight, out, eps, x.stride(0), gate.stride(0), N=size, GROUPS=groups,
        WEIGHTS=1 if weight is None else len(weight) // size, NORM=weight is not None, GATE_FIRST=order == "gate first",
        SIGMOID=sigmoid, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **dependent_launch.options(x),
    )  # fmt: skip
    return out
