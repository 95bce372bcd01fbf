"""Triton: one token of each row through a state space whose heads decay by one factor a token.

A program takes a row, a head, and some of its inputs; those do not meet each other. Bound: reads and writes each row's state
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.state.contracts import Slots, SpaceShape
from sapwood_kernels.state.triton_math import silu, softplus

_TILE = 4096
"""Numbers of the state that a program of four warps holds."""


@triton.jit
def _space_step_kernel(
    inputs, steps, states, slots, decay, bias, skip, out, least, most, input_stride, step_stride, state_stride,
    HEADS: tl.constexpr, PER: tl.constexpr, P: tl.constexpr, N: tl.constexpr, OFFSET: tl.constexpr,
    X_AT: tl.constexpr, X_STRIDE: tl.constexpr, B_AT: tl.constexpr, C_AT: tl.constexpr, GROUP_STRIDE: tl.constexpr,
    STEPPED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    places = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row)
    numbers = tl.arange(0, BLOCK_N)
    is_place, is_number = places < P, numbers < N
    out += (row * HEADS + head) * P + places
    if slot < 0:
        tl.store(out, 0.0, mask=is_place)
    else:
        at = states + slot * state_stride + OFFSET + head * (P * N) + places[:, None] * N + numbers[None]
        in_tile = is_place[:, None] & is_number[None]
        state = tl.load(at, mask=in_tile, other=0.0)
        inputs += row * input_stride
        of_group = inputs + (head // PER) * GROUP_STRIDE + numbers
        x = tl.load(inputs + X_AT + head * X_STRIDE + places, mask=is_place, other=0.0).to(tl.float32)
        b = tl.load(of_group + B_AT, mask=is_number, other=0.0).to(tl.float32)
        c = tl.load(of_group + C_AT, mask=is_number, other=0.0).to(tl.float32)
        if STEPPED:
            step = softplus(tl.load(steps + row * step_stride + head).to(tl.float32) + tl.load(bias + head))
            step = tl.minimum(tl.maximum(step, least), most)
            left = tl.exp(-tl.exp(tl.load(decay + head)) * step)
            written = x * step
            skipped = x * tl.load(skip + head)
        else:
            x, b, c = silu(x), silu(b), silu(c)
            left = tl.exp(tl.load(decay + head))
            written = x
            skipped = 0.0
        state = left * state + written[:, None] * b[None]
        result = tl.sum(state * c[None], axis=1) + skipped
        tl.debug_barrier()  # threads that hold the same numbers have read them
        tl.store(at, state, mask=in_tile)
        tl.store(out, result, mask=is_place)


def space_step(
    inputs: Tensor,
    step: Tensor,
    slots: Slots,
    offset: int,
    decay: Tensor,
    bias: Tensor,
    skip: Tensor,
    limits: tuple[float, float],
    shape: SpaceShape,
) -> Tensor:
    """Computes :meth:`StateSteps.space`."""
    inner, states = shape.heads * shape.head_dim, shape.groups * shape.state_size
    starts = {"X_AT": 0, "X_STRIDE": shape.head_dim, "B_AT": inner, "C_AT": inner + states}
    return _launch(
        inputs,
        step,
        slots,
        offset,
        decay,
        bias,
        skip,
        limits,
        shape,
        GROUP_STRIDE=shape.state_size,
        STEPPED=True,
        **starts,
    )


def linear_step(qkv: Tensor, slots: Slots, rates: Tensor, shape: SpaceShape) -> Tensor:
    """Computes :meth:`StateSteps.linear`."""
    dim = shape.head_dim
    starts = {"X_AT": 2 * dim, "X_STRIDE": 3 * dim, "B_AT": dim, "C_AT": 0, "GROUP_STRIDE": 3 * dim}
    return _launch(qkv, qkv, slots, 0, rates, rates, rates, (0.0, 0.0), shape, STEPPED=False, **starts)


def _launch(
    inputs: Tensor,
    step: Tensor,
    slots: Slots,
    offset: int,
    decay: Tensor,
    bias: Tensor,
    skip: Tensor,
    limits: tuple[float, float],
    shape: SpaceShape,
    **places: int,
) -> Tensor:
    rows, heads, dim, size = len(inputs), shape.heads, shape.head_dim, shape.state_size
    out = torch.empty(rows, heads * dim, dtype=torch.float32, device=inputs.device)
    block_n = triton.next_power_of_2(size)
    block_p = min(max(_TILE // block_n, 1), triton.next_power_of_2(dim))
    _space_step_kernel[(heads, triton.cdiv(dim, block_p), rows)](
        inputs, step, slots.states, slots.rows, decay, bias, skip, out, *limits, inputs.stride(0), step.stride(0),
        slots.states.stride(0), HEADS=heads, PER=heads // shape.groups, P=dim, N=size, OFFSET=offset, BLOCK_P=block_p,
        BLOCK_N=block_n, num_warps=4, **places, **dependent_launch.options(inputs),
    )  # fmt: skip
    return out
