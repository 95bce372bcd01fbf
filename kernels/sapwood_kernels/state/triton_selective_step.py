"""Triton: one token of each row through the state space of Mamba 1, in which each number decays by itself, and its gate.
Bound: reads and writes each row's state once, and reads the rates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.state.contracts import Slots
from sapwood_kernels.state.triton_math import silu, softplus

_TILE = 2048
"""Numbers of the state that a program of four warps holds."""


@triton.jit
def _selective_step_kernel(
    x, steps, b, c, gate, states, slots, decay, skip, out, x_stride, step_stride, b_stride, c_stride, gate_stride, state_stride,
    C: tl.constexpr, N: tl.constexpr, OFFSET: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels, numbers = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64)
    is_channel, is_number = channels < C, numbers < N
    slot = tl.load(slots + row)
    out += row * C + channels
    if slot < 0:
        tl.store(out, 0.0, mask=is_channel)
    else:
        tile = channels[:, None] * N + numbers[None]
        in_tile = is_channel[:, None] & is_number[None]
        at = states + slot * state_stride + OFFSET + tile
        state = tl.load(at, mask=in_tile, other=0.0)
        rates = -tl.exp(tl.load(decay + tile, mask=in_tile, other=0.0))
        own = tl.load(x + row * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        step = softplus(tl.load(steps + row * step_stride + channels, mask=is_channel, other=0.0).to(tl.float32))
        read = tl.load(b + row * b_stride + numbers, mask=is_number, other=0.0).to(tl.float32)
        shown = tl.load(c + row * c_stride + numbers, mask=is_number, other=0.0).to(tl.float32)
        open_by = tl.load(gate + row * gate_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        state = tl.exp(step[:, None] * rates) * state + (step * own)[:, None] * read[None]
        result = tl.sum(state * shown[None], axis=1)
        result += own * tl.load(skip + channels, mask=is_channel, other=0.0)
        tl.debug_barrier()  # threads that hold the same numbers have read them
        tl.store(at, state, mask=in_tile)
        tl.store(out, (result * silu(open_by)).to(out.dtype.element_ty), mask=is_channel)


def selective_step(
    x: Tensor,
    step: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    slots: Slots,
    offset: int,
    decay: Tensor,
    skip: Tensor,
) -> Tensor:
    """Computes :meth:`StateSteps.selective`."""
    rows, (channels, size) = len(x), decay.shape
    out = torch.empty(rows, channels, dtype=gate.dtype, device=x.device)
    block_n = triton.next_power_of_2(size)
    block_c = min(max(_TILE // block_n, 1), triton.next_power_of_2(channels))
    _selective_step_kernel[(triton.cdiv(channels, block_c), rows)](
        x, step, b, c, gate, slots.states, slots.rows, decay, skip, out, x.stride(0), step.stride(0), b.stride(0), c.stride(0),
        gate.stride(0), slots.states.stride(0), C=channels, N=size, OFFSET=offset, BLOCK_C=block_c, BLOCK_N=block_n,
        num_warps=4, **dependent_launch.options(x),
    )  # fmt: skip
    return out
