"""Triton: one token of each row through a gated delta net: convolution, norms of queries and keys, delta rule, gated norm.

A program takes a row and a key head with all value heads that share it, one after another, so that one program alone reads and
writes the convolution's window of a key head. With the state S before the token:

    u = b (v - e^g S' k),   out = e^g S' q + (k . q) u,   S <- e^g S + k u'

so one pass over the state gives both products. Bound: reads and writes each row's state once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.state.contracts import DeltaShape, DeltaWeights, Slots
from sapwood_kernels.state.triton_math import convolved, shift_window, silu, softplus, window_inputs

_EPS = tl.constexpr(1e-6)
MOST_REGISTERS = 128
"""Of a thread: two programs of eight warps then share a multiprocessor, and one reads its state while the other computes."""


@triton.jit
def _delta_step_kernel(
    inputs, factors, states, slots, convolution, decay, bias, norm, out, eps, scale, input_stride, factor_stride, state_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr, JOINED: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    keys, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key, is_value = keys < K, values < V
    inputs += row * input_stride
    factors += row * factor_stride
    out += (row * HEADS + head) * SHARED * V
    if slot < 0:
        for place in range(SHARED):
            tl.store(out + place * V + values, 0.0, mask=is_value)
    else:
        if JOINED:
            inputs += head * (2 * K + 2 * SHARED * V)
            of_query, of_key, of_value, of_gate = inputs, inputs + K, inputs + 2 * K, inputs + 2 * K + SHARED * V
            of_strength = factors + head * 2 * SHARED
            of_decay = of_strength + SHARED
        else:
            of_query, of_key = inputs + head * K, inputs + (HEADS + head) * K
            of_value = inputs + 2 * HEADS * K + head * SHARED * V
            of_gate = of_value + HEADS * SHARED * V
            of_strength = factors + head * SHARED
            of_decay = of_strength + HEADS * SHARED
        window = states + slot * state_stride
        memory = window + (2 * HEADS * K + HEADS * SHARED * V) * (TAPS - 1)
        query_channels, key_channels = head * K + keys, (HEADS + head) * K + keys
        query = tl.load(of_query + keys, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(of_key + keys, mask=is_key, other=0.0).to(tl.float32)
        query_inputs = window_inputs(query, window, query_channels, is_key, TAPS, BLOCK_TAPS)
        key_inputs = window_inputs(key, window, key_channels, is_key, TAPS, BLOCK_TAPS)
        query = silu(convolved(query_inputs, convolution, query_channels, is_key, TAPS, BLOCK_TAPS))
        key = silu(convolved(key_inputs, convolution, key_channels, is_key, TAPS, BLOCK_TAPS))
        tl.debug_barrier()  # threads that hold the same numbers have read them
        shift_window(query_inputs, window, query_channels, is_key, TAPS, BLOCK_TAPS)
        shift_window(key_inputs, window, key_channels, is_key, TAPS, BLOCK_TAPS)
        query = query * (tl.rsqrt(tl.sum(query * query, axis=0) + _EPS) * scale)
        key = key * tl.rsqrt(tl.sum(key * key, axis=0) + _EPS)
        met = tl.sum(query * key, axis=0)
        weight = tl.load(norm + values, mask=is_value, other=0.0)
        tile = keys[:, None] * V + values[None]
        in_tile = is_key[:, None] & is_value[None]
        for place in range(SHARED):
            at = head * SHARED + place
            own = memory + at * (K * V)
            state = tl.load(own + tile, mask=in_tile, other=0.0)
            channels = 2 * HEADS * K + at * V + values
            value = tl.load(of_value + place * V + values, mask=is_value, other=0.0).to(tl.float32)
            gate = tl.load(of_gate + place * V + values, mask=is_value, other=0.0).to(tl.float32)
            strength = tl.sigmoid(tl.load(of_strength + place).to(tl.float32))
            step = softplus(tl.load(of_decay + place).to(tl.float32) + tl.load(bias + at))
            left = tl.exp(-tl.exp(tl.load(decay + at)) * step)
            value_inputs = window_inputs(value, window, channels, is_value, TAPS, BLOCK_TAPS)
            value = silu(convolved(value_inputs, convolution, channels, is_value, TAPS, BLOCK_TAPS))
            known = left * tl.sum(state * key[:, None], axis=0)
            found = left * tl.sum(state * query[:, None], axis=0)
            change = strength * (value - known)
            result = found + met * change
            tl.debug_barrier()
            shift_window(value_inputs, window, channels, is_value, TAPS, BLOCK_TAPS)
            tl.store(own + tile, left * state + key[:, None] * change[None], mask=in_tile)
            result = result * tl.rsqrt(tl.sum(tl.where(is_value, result * result, 0.0), axis=0) / V + eps)
            result = result * weight * silu(gate)
            tl.store(out + place * V + values, result.to(out.dtype.element_ty), mask=is_value)


def delta_step(inputs: Tensor, factors: Tensor, slots: Slots, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
    """Computes :meth:`StateSteps.delta`."""
    rows, heads, shared = len(inputs), shape.heads, shape.shared
    out = torch.empty(rows, heads * shared * shape.value_dim, dtype=inputs.dtype, device=inputs.device)
    block_k, block_v = (triton.next_power_of_2(each) for each in (shape.key_dim, shape.value_dim))
    limit = {"maxnreg": MOST_REGISTERS} if inputs.is_cuda and torch.version.cuda is not None else {}
    _delta_step_kernel[(heads, rows)](
        inputs, factors, slots.states, slots.rows, weights.convolution, weights.decay, weights.bias, weights.norm, out,
        shape.eps, shape.key_dim**-0.5, inputs.stride(0), factors.stride(0), slots.states.stride(0), HEADS=heads,
        SHARED=shared, K=shape.key_dim, V=shape.value_dim, TAPS=shape.taps, JOINED=shape.joined, BLOCK_K=block_k,
        BLOCK_V=block_v, BLOCK_TAPS=triton.next_power_of_2(shape.taps), num_warps=8, **limit, **dependent_launch.options(inputs),
    )  # fmt: skip
    return out
