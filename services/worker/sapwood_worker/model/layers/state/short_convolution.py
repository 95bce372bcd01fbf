"""The gated short convolution of LFM2: its state is the last inputs of the convolution.

Source: Liquid AI, "LFM2 Technical Report", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sapwood_kernels.state.contracts import Slots, StateSteps
from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import AnyNorm
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.layers.state.state_layer import StateLayer, convolve
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots, whole


@dataclass(frozen=True, slots=True)
class ShortConvolutionConfig:
    """Implements :class:`sapwood_worker.model.layers.state.state_layer.StateConfig`.

    Attributes:
        channels: Of the convolution: the model's width.
        taps: Inputs that an output depends on.
        bias: Whether projections and convolution have biases.
        name: What checkpoints call the layer.
    """

    channels: int
    taps: int
    bias: bool
    name: str = "conv"

    @property
    def numbers(self) -> int:
        return self.channels * (self.taps - 1)

    @property
    def heads(self) -> int:
        return self.channels

    def build(self, hidden_size: int, index: int, context: LayerContext) -> ShortConvolution:
        return ShortConvolution(self, hidden_size, index, context)


class ShortConvolution(StateLayer):
    """``out_proj(c * convolution(b * x))``, where b, c and x are projections of the input.

    Args:
        config: Its sizes.
        hidden_size: Width in and out.
        index: The layer's.
        context: Where and how it is built.
    """

    def __init__(self, config: ShortConvolutionConfig, hidden_size: int, index: int, context: LayerContext) -> None:
        super().__init__()
        self._config, self._index, self._prefix = config, index, context.prefix
        channels = self._channels = context.parallel.shard("hidden_size", config.channels)
        inputs = dict.fromkeys(("in_proj_b", "in_proj_c", "in_proj_x"), channels)
        self.inputs = ColumnLinear(hidden_size, inputs, config.bias, context)
        self.output = RowLinear(channels, "out_proj", hidden_size, config.bias, context)
        self.ranks = self.output.ranks
        self._ops = context.ops
        count = channels.size
        self._weight = torch.empty(count, 1, config.taps, dtype=torch.float32, device=context.device)
        self._bias = torch.empty(count, dtype=torch.float32, device=context.device) if config.bias else None

    def slots(self) -> WeightSlots:
        rest = whole(1), whole(self._config.taps)
        slots = {f"{self._prefix}.conv.weight": WeightSlot(self._weight, spans=(self._channels, *rest))}
        if self._bias is not None:
            slots[f"{self._prefix}.conv.bias"] = WeightSlot(self._bias, spans=(self._channels,))
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
        inputs = self.inputs(hidden, norm)
        mixed = plan.states.step(self._index, self._ops, partial(self._step, inputs))
        if mixed is None:
            before, after, x = inputs.chunk(3, -1)
            mixed = after * plan.states.scan(self._index, before * x, self._channels.size, self._scan)
        result: Tensor = self.output(mixed, None, residual)
        return result

    def _step(self, inputs: Tensor, steps: StateSteps, slots: Slots) -> Tensor:
        return steps.convolve_gated(inputs, slots, self._weight[:, 0], self._bias)

    def _scan(self, x: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        known = states.index_select(0, slots).view(len(slots), self._channels.size, -1)
        out, last = convolve(x.float(), known, self._weight[:, 0], self._bias)
        states.index_copy_(0, slots, last.reshape(len(slots), -1))
        return out.to(x.dtype)
