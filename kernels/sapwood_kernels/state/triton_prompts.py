"""Triton: prompts of all kinds of states, by the kernels of this folder: convolutions, recurrences in chunks, and a norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.state.contracts import DeltaShape, DeltaWeights, Slots, SpaceShape
from sapwood_kernels.state.spans import Spans
from sapwood_kernels.state.triton_gated_norm import gated_norm
from sapwood_kernels.state.triton_span_convolution import Heads, convolve
from sapwood_kernels.state.triton_span_inverse import inverses
from sapwood_kernels.state.triton_span_scan import Delta, scan
from sapwood_kernels.state.triton_span_selective import selective_scan


class TritonPrompts:
    """Implements :class:`sapwood_kernels.state.contracts.StateSteps` for spans.

    States and sums are float32; between kernels numbers have the dtype of the inputs, and so have the factors of products.

    Attributes:
        launches: How often it was called.
    """

    def __init__(self) -> None:
        self.launches = 0

    def delta(self, inputs: Tensor, factors: Tensor, slots: Slots, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
        spans, channels = self._begin(slots), len(weights.convolution)
        heads, shared, keys, values = shape.heads, shape.shared, shape.key_dim, shape.value_dim
        if shape.joined:
            width = 2 * (keys + shared * values)
            gate = inputs.view(len(inputs), heads, width)[:, :, 2 * keys + shared * values :]
            mixed, lying = inputs, Heads(heads, keys, shared * values, width)
            strength, step = (each.flatten(1) for each in factors.view(len(inputs), heads, -1).chunk(2, 2))
        else:
            lying = None
            mixed, gate = torch.split(inputs, [channels, heads * shared * values], 1)
            strength, step = factors.chunk(2, 1)
        beta = strength.float().sigmoid()
        decay = -weights.decay.exp() * F.softplus(step.float() + weights.bias)
        convolved = torch.empty(len(inputs), channels, dtype=inputs.dtype, device=inputs.device)
        convolve(mixed, slots.states, spans, weights.convolution, None, convolved, silu=True, heads=lying)
        precision = _precision(inputs)
        solved = Delta(*inverses(convolved, decay, beta, spans, heads, keys, precision))
        q, k, v = torch.split(convolved, [heads * keys, heads * keys, heads * shared * values], 1)
        out = torch.empty(len(inputs), heads * shared, values, dtype=inputs.dtype, device=inputs.device)
        scan(
            q.view(-1, heads, keys), k.view(-1, heads, keys), v.view(-1, heads * shared, values), decay,
            slots.states[:, channels * (shape.taps - 1) :], spans, out, key_major=True, delta=solved, precision=precision,
        )  # fmt: skip
        return gated_norm(out.flatten(1), gate, weights.norm, shape.eps, heads * shared, "norm first", inputs.dtype)

    def convolve(self, x: Tensor, slots: Slots, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        convolve(x, slots.states, self._begin(slots), weight, bias, out, silu=True)
        return out

    def convolve_gated(self, inputs: Tensor, slots: Slots, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(len(inputs), len(weight), dtype=inputs.dtype, device=inputs.device)
        convolve(inputs, slots.states, self._begin(slots), weight, bias, out, gated=True)
        return out

    def space(
        self,
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
        heads, groups, size = shape.heads, shape.groups, shape.state_size
        x, b, c = torch.split(inputs, [heads * shape.head_dim, groups * size, groups * size], 1)
        steps = F.softplus(step.float() + bias).clamp(*limits)
        out = torch.empty(len(inputs), heads, shape.head_dim, dtype=inputs.dtype, device=inputs.device)
        scan(
            c.view(-1, groups, size), b.view(-1, groups, size), x.view(-1, heads, shape.head_dim), steps * -decay.exp(),
            slots.states[:, offset:], self._begin(slots), out, key_major=False, step=steps, skip=skip,
            precision=_precision(inputs),
        )  # fmt: skip
        return out.flatten(1)

    def linear(self, qkv: Tensor, slots: Slots, rates: Tensor, shape: SpaceShape) -> Tensor:
        heads, dim = shape.heads, shape.head_dim
        q, k, v = F.silu(qkv).view(len(qkv), heads, 3 * dim).chunk(3, 2)
        out = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
        scan(
            q, k, v, rates.expand(len(qkv), -1), slots.states, self._begin(slots), out, key_major=False,
            precision=_precision(qkv),
        )  # fmt: skip
        return out.flatten(1)

    def selective(
        self,
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
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        steps = F.softplus(step.float())
        selective_scan(x, steps, -decay.exp(), b, c, skip, slots.states[:, offset:], self._begin(slots), out)
        return gated_norm(out, gate, None, 0.0, 1, "gate first", gate.dtype)

    def _begin(self, slots: Slots) -> Spans:
        assert slots.spans is not None
        self.launches += 1
        return slots.spans


def _precision(x: Tensor) -> str:
    """That of products of float32: three of tf32, which keep all digits, where the inputs have them."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
