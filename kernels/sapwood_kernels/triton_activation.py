"""Triton: the gated activations of an MLP. Bound: reads each input and writes each output once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gated_kernel(gate_up, out, N, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gate = tl.load(gate_up + row * 2 * N + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh z) = sigmoid(2 z)
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out + row * N + columns, (active * up).to(out.dtype.element_ty), mask=inside)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, double = gate_up.shape
    width = double // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, GELU=gelu, BLOCK=_BLOCK, num_warps=4)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Computes ``reference.silu_mul``: contiguous [T, 2N] -> [T, N]."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Computes ``reference.gelu_tanh_mul``: contiguous [T, 2N] -> [T, N]."""
    return _gated(gate_up, gelu=True)
