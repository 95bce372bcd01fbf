"""The layer of Mamba 2: a state space whose heads decay by one factor a token.

For inputs x, projections b and c, and a step d > 0 of a head with decay rate a < 0, with the state S before a token:

    S <- e^(d a) S + d x b',   out = S c + skip x

Algorithm (SSD): in chunks of tokens; what tokens of a chunk give each other is a product of matrices masked by decays, what the
state before the chunk gives is another one. One token is a chunk of length one. O(T (chunk + state size)) products of vectors
for each head. Everything is float32.

Source: Dao and Gu, "Transformers are SSMs", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.state.contracts import GateOrder, Slots, SpaceShape, StateSteps
from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import AnyNorm
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.layers.state.state_layer import StateLayer, convolve, decays
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots, whole

CHUNK = 64
"""Tokens that are computed together."""


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Implements :class:`sapwood_worker.model.layers.state.state_layer.StateConfig`.

    Attributes:
        all_heads: Heads.
        head_dim: Inputs of a head.
        groups: Groups of heads; each shares ``b`` and ``c``, and is normed by itself.
        state_size: Numbers that each input of a head has in the state.
        taps: Inputs that an output of the convolution before depends on.
        eps: Added to the mean square in the norm behind.
        convolution_bias: Whether the convolution has a bias.
        bias: Whether the projection before has a bias.
        output_bias: Whether the projection behind has one.
        step_limits: The least and the largest step.
        norm: Whether the norm comes behind the gate, before it, or is missing.
        input_scale: Factor on the input.
        scales: Factors on the parts of the projection: gate, x, b, c, step.
        output_scale: Factor on the output.
        name: What checkpoints call the layer.
    """

    all_heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    eps: float
    convolution_bias: bool
    bias: bool
    output_bias: bool
    step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["behind", "before", "none"] = "behind"
    input_scale: float = 1.0
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0
    name: str = "mamba"

    def __post_init__(self) -> None:
        if self.all_heads % self.groups:
            raise ValueError(f"{self.all_heads} heads of Mamba 2 cannot be divided into {self.groups} groups")

    @property
    def heads(self) -> int:
        return self.groups

    @property
    def inner(self) -> int:
        """Inputs of all heads."""
        return self.all_heads * self.head_dim

    @property
    def numbers(self) -> int:
        channels = self.inner + 2 * self.groups * self.state_size
        return channels * (self.taps - 1) + self.inner * self.state_size

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """The projections and channels that checkpoints store as one tensor, as ``ModelFamily.fused`` has them."""
        state = self.groups * self.state_size
        parts = {"x": self.inner, "b": state, "c": state}
        inside = {"z": self.inner, **parts, "dt": self.all_heads}
        return {
            f"{self.name}.in_proj": {f"{self.name}.in_proj_{part}": size for part, size in inside.items()},
            f"{self.name}.conv1d": {f"{self.name}.conv_{part}": size for part, size in parts.items()},
        }

    def build(self, hidden_size: int, index: int, context: LayerContext) -> StateLayer:
        return Mamba2(self, hidden_size, index, context)


class Mamba2(StateLayer):
    """Projections, a short convolution, the state space, and a gated norm. Groups are split over the ranks.

    Args:
        config: Its sizes.
        hidden_size: Width in and out.
        index: The layer's.
        context: Where and how it is built.
    """

    def __init__(self, config: Mamba2Config, hidden_size: int, index: int, context: LayerContext) -> None:
        super().__init__()
        self._config, self._index, self._prefix = config, index, context.prefix
        heads, state = config.all_heads // config.groups, config.state_size
        inner = context.parallel.shard("groups of Mamba 2's heads", config.groups, heads * config.head_dim)
        states = context.parallel.shard("groups of Mamba 2's heads", config.groups, state)
        self._heads = context.parallel.shard("groups of Mamba 2's heads", config.groups, heads)
        self._groups, self._inner = states.size // state, inner
        self._convolved = {"x": inner, "b": states, "c": states}
        parts = {"z": inner, **self._convolved, "dt": self._heads}
        inputs = {f"in_proj_{part}": span for part, span in parts.items()}
        self.inputs = ColumnLinear(hidden_size, inputs, config.bias, context)
        self.output = RowLinear(inner, "out_proj", hidden_size, config.output_bias, context)
        self.ranks = self.output.ranks
        self._sizes = [span.size for span in parts.values()]

        def empty(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=context.device)

        self._convolution = empty(sum(span.size for span in self._convolved.values()), 1, config.taps)
        self._convolution_bias = empty(len(self._convolution)) if config.convolution_bias else None
        self._decay, self._step, self._skip = (empty(self._heads.size) for _ in range(3))
        self._ops = context.ops
        self._norm = None if config.norm == "none" else empty(inner.size)
        scales = [torch.full((size,), scale) for size, scale in zip(self._sizes, config.scales, strict=True)]
        self._scales = None if set(config.scales) == {1.0} else torch.cat(scales).to(context.device)

    def slots(self) -> WeightSlots:
        sizes = [span.size for span in self._convolved.values()]
        split = zip(self._convolved.items(), torch.split(self._convolution, sizes), strict=True)
        slots = {
            f"{self._prefix}.conv_{part}.weight": WeightSlot(own, spans=(span, whole(1), whole(self._config.taps)))
            for (part, span), own in split
        }
        if self._convolution_bias is not None:
            biases = zip(self._convolved.items(), torch.split(self._convolution_bias, sizes), strict=True)
            slots |= {
                f"{self._prefix}.conv_{part}.bias": WeightSlot(own, spans=(span,)) for (part, span), own in biases
            }
        for name, own in (("A_log", self._decay), ("dt_bias", self._step), ("D", self._skip)):
            slots[f"{self._prefix}.{name}"] = WeightSlot(own, spans=(self._heads,))
        if self._norm is not None:
            slots[f"{self._prefix}.norm.weight"] = WeightSlot(self._norm, spans=(self._inner,))
        return slots

    def forward(
        self,
        hidden: Tensor,
        norm: AnyNorm | None,
        angles: Angles,
        plan: AttentionPlan,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert plan.states is not None
        config = self._config
        normed = hidden if norm is None else norm(hidden)
        if config.input_scale != 1.0:
            normed = normed * config.input_scale
        projected = self.inputs(normed, None)
        if self._scales is not None:
            projected = projected * self._scales.to(projected.dtype)
        gate, inputs = torch.split(projected, [self._inner.size, sum(self._sizes[1:])], 1)
        mixed = plan.states.step(self._index, self._ops, partial(self._step_by, inputs))
        if mixed is None:
            mixed = plan.states.scan(self._index, inputs.float(), self._inner.size, self._scan)
        order: GateOrder = "norm first" if config.norm == "before" else "gate first"
        out = self._ops.gated_norm(mixed, gate, self._norm, config.eps, self._groups, order, hidden.dtype)
        if config.output_scale != 1.0:
            out = out * config.output_scale  # the projection behind has no bias then
        result: Tensor = self.output(out, None, residual)
        return result

    def _step_by(self, inputs: Tensor, steps: StateSteps, slots: Slots) -> Tensor:
        config, channels = self._config, len(self._convolution)
        xbc, step = torch.split(inputs, [channels, self._heads.size], 1)
        convolved = steps.convolve(xbc, slots, self._convolution[:, 0], self._convolution_bias)
        shape = SpaceShape(self._heads.size, self._groups, config.head_dim, config.state_size)
        return steps.space(
            convolved, step, slots, channels * (config.taps - 1), self._decay, self._step, self._skip, config.step_limits,
            shape,
        )  # fmt: skip

    def _scan(self, inputs: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        config, heads, groups = self._config, self._heads.size, self._groups
        size, count, _ = inputs.shape
        channels = len(self._convolution)
        xbc, step = torch.split(inputs, [channels, heads], 2)
        known = states.index_select(0, slots)
        kept = channels * (config.taps - 1)
        before, memory = torch.split(known, [kept, known.shape[1] - kept], 1)
        convolved, last = convolve(
            xbc, before.view(size, channels, -1), self._convolution[:, 0], self._convolution_bias
        )
        x, b, c = torch.split(F.silu(convolved), self._sizes[1:4], 2)
        x = x.view(size, count, heads, config.head_dim)
        b, c = (each.view(size, count, groups, -1) for each in (b, c))
        step = F.softplus(step + self._step).clamp(*config.step_limits)
        memory = memory.view(size, heads, config.head_dim, config.state_size)
        out, memory = state_space(x, step, -self._decay.exp(), b, c, memory)
        states.index_copy_(0, slots, torch.cat((last.flatten(1), memory.flatten(1)), 1))
        result: Tensor = out + self._skip[:, None] * x
        return result.flatten(2)


def state_space(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state space, in chunks.

    Args:
        x: float32 [B, T, H, P].
        step: float32 [B, T, H], above 0.
        rate: float32 [H], below 0.
        b, c: float32 [B, T, G, N]; H is a multiple of G.
        state: float32 [B, H, P, N]: before the first token.

    Returns:
        The outputs [B, T, H, P], and the state after the last token.
    """
    outs = []
    shared = x.shape[2] // b.shape[2]
    decay = (step * rate).transpose(1, 2)
    x = (x * step[..., None]).transpose(1, 2)
    b, c = (each.transpose(1, 2) for each in (b, c))
    for start in range(0, x.shape[2], CHUNK):
        at = slice(start, start + CHUNK)
        xs, bs, cs = x[:, :, at], b[:, :, at], c[:, :, at]
        total, left = decays(decay[:, :, at])
        # Heads of a group share these products.
        near = (cs @ bs.transpose(2, 3)).repeat_interleave(shared, 1)
        bs, cs = bs.repeat_interleave(shared, 1), cs.repeat_interleave(shared, 1)
        outs.append((near * left) @ xs + total[..., None] * (cs @ state.transpose(2, 3)))
        state = total[..., -1:, None] * state + (left[:, :, -1, :, None] * xs).transpose(2, 3) @ bs
    return torch.cat(outs, 2).transpose(1, 2), state
