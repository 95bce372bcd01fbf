"""Triton: one token of each row through a short convolution, with what is before and behind it. Bound: reads and writes each
row's window once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.state.contracts import Slots
from sapwood_kernels.state.triton_math import convolved, shift_window, silu, window_inputs

_BLOCK = 256


@triton.jit
def _convolution_step_kernel(
    inputs, states, slots, weight, bias, out, input_stride, state_stride, C: tl.constexpr, TAPS: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = channels < C
    slot = tl.load(slots + row)
    out += row * C + channels
    if slot < 0:
        tl.store(out, 0.0, mask=inside)
    else:
        window = states + slot * state_stride
        at = inputs + row * input_stride + channels
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            x *= tl.load(at + 2 * C, mask=inside, other=0.0).to(tl.float32)
        every = window_inputs(x, window, channels, inside, TAPS, BLOCK_TAPS)
        result = convolved(every, weight, channels, inside, TAPS, BLOCK_TAPS)
        if HAS_BIAS:
            result += tl.load(bias + channels, mask=inside, other=0.0)
        if GATED:
            result *= tl.load(at + C, mask=inside, other=0.0).to(tl.float32)
        else:
            result = silu(result)
        tl.debug_barrier()  # threads that hold the same numbers have read them
        shift_window(every, window, channels, inside, TAPS, BLOCK_TAPS)
        tl.store(out, result.to(out.dtype.element_ty), mask=inside)


def convolution_step(x: Tensor, slots: Slots, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes :meth:`StateSteps.convolve`."""
    out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    return _launch(x, slots, weight, bias, out, gated=False)


def gated_convolution_step(inputs: Tensor, slots: Slots, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes :meth:`StateSteps.convolve_gated`."""
    out = torch.empty(len(inputs), len(weight), dtype=inputs.dtype, device=inputs.device)
    return _launch(inputs, slots, weight, bias, out, gated=True)


def _launch(inputs: Tensor, slots: Slots, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool) -> Tensor:
    channels, taps = weight.shape
    _convolution_step_kernel[(triton.cdiv(channels, _BLOCK), len(inputs))](
        inputs, slots.states, slots.rows, weight, weight if bias is None else bias, out, inputs.stride(0),
        slots.states.stride(0), C=channels, TAPS=taps, GATED=gated, HAS_BIAS=bias is not None, BLOCK=_BLOCK,
        BLOCK_TAPS=triton.next_power_of_2(taps), num_warps=4, **dependent_launch.options(inputs),
    )  # fmt: skip
    return out
