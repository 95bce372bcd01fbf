"""The layer of Mamba 1, as Jamba has it: a state space in which each channel and each number of its state decays by itself.

For an input x of a channel, projections b and c, a step d > 0 and decay rates a < 0, with the channel's state s before a token:

    s <- e^(d a) s + d x b,   out = s . c + skip x

Algorithm: token by token, over all channels at once; there is no form in chunks, because each number has a decay of its own.
O(T channels state). Everything is float32.

Source: Gu and Dao, "Mamba", 2023; Lieber et al., "Jamba", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.state.contracts import Slots, StateSteps
from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import AnyNorm, RMSNorm
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.layers.state.state_layer import StateLayer, convolve
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots, whole


@dataclass(frozen=True, slots=True)
class Mamba1Config:
    """Implements :class:`sapwood_worker.model.layers.state.state_layer.StateConfig`.

    Attributes:
        channels: Channels.
        state_size: Numbers of each channel's state.
        taps: Inputs that an output of the convolution before depends on.
        rank: Numbers that steps are projected from.
        eps: Added to the mean square in the norms of steps, b and c.
        convolution_bias: Whether the convolution has a bias.
        bias: Whether the projections before and behind have biases.
        name: What checkpoints call the layer.
    """

    channels: int
    state_size: int
    taps: int
    rank: int
    eps: float
    convolution_bias: bool
    bias: bool
    name: str = "mamba"

    @property
    def heads(self) -> int:
        return self.channels

    @property
    def numbers(self) -> int:
        return self.channels * (self.taps - 1 + self.state_size)

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """The projections that checkpoints store as one tensor, as ``ModelFamily.fused`` has them."""
        return {f"{self.name}.in_proj": dict.fromkeys((f"{self.name}.in_x", f"{self.name}.in_z"), self.channels)}

    def build(self, hidden_size: int, index: int, context: LayerContext) -> StateLayer:
        return Mamba1(self, hidden_size, index, context)


class Mamba1(StateLayer):
    """Projections, a short convolution, the state space, and a gate. Channels are split over the ranks.

    Args:
        config: Its sizes.
        hidden_size: Width in and out.
        index: The layer's.
        context: Where and how it is built.
    """

    def __init__(self, config: Mamba1Config, hidden_size: int, index: int, context: LayerContext) -> None:
        super().__init__()
        self._config, self._index, self._prefix = config, index, context.prefix
        own = self._own = context.parallel.shard("channels of Mamba", config.channels)
        self.inputs = ColumnLinear(hidden_size, {"in_x": own, "in_z": own}, config.bias, context)
        self.chosen = RowLinear(own, "x_proj", config.rank + 2 * config.state_size, False, context)
        self.steps = ColumnLinear(config.rank, {"dt_proj": own}, True, context)
        self.output = RowLinear(own, "out_proj", hidden_size, config.bias, context)
        self.ranks = self.output.ranks
        self.step_norm, self.b_norm, self.c_norm = (
            RMSNorm(width, config.eps, context.inside(name))
            for name, width in (
                ("dt_layernorm", config.rank), ("b_layernorm", config.state_size), ("c_layernorm", config.state_size),
            )
        )  # fmt: skip
        self._dtype, self._ops = context.dtype, context.ops

        def empty(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=context.device)

        self._convolution = empty(own.size, 1, config.taps)
        self._bias = empty(own.size) if config.convolution_bias else None
        self._decay, self._skip = empty(own.size, config.state_size), empty(own.size)

    def slots(self) -> WeightSlots:
        own, config = self._own, self._config
        slots = {
            f"{self._prefix}.conv1d.weight": WeightSlot(self._convolution, spans=(own, whole(1), whole(config.taps))),
            f"{self._prefix}.A_log": WeightSlot(self._decay, spans=(own, whole(config.state_size))),
            f"{self._prefix}.D": WeightSlot(self._skip, spans=(own,)),
        }
        if self._bias is not None:
            slots[f"{self._prefix}.conv1d.bias"] = WeightSlot(self._bias, spans=(own,))
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
        x, gate = self.inputs(hidden, norm).chunk(2, 1)
        out = plan.states.step(self._index, self._ops, partial(self._step, x, gate))
        if out is None:
            mixed = plan.states.scan(self._index, x.float(), self._own.size, self._scan)
            out = (mixed * F.silu(gate.float())).to(hidden.dtype)
        result: Tensor = self.output(out, None, residual)
        return result

    def _step(self, x: Tensor, gate: Tensor, steps: StateSteps, slots: Slots) -> Tensor:
        x = steps.convolve(x, slots, self._convolution[:, 0], self._bias)
        offset = self._own.size * (self._config.taps - 1)
        return steps.selective(x, *self._projected(x), gate, slots, offset, self._decay, self._skip)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the convolved inputs, float32 [T, channels]: steps before softplus [T, channels], b and c [T, state_size]."""
        rank, size = self._config.rank, self._config.state_size
        step, b, c = torch.split(self.chosen(x.to(self._dtype)), [rank, size, size], 1)
        return (
            self.steps(self.step_norm(step.contiguous()), None),
            self.b_norm(b.contiguous()),
            self.c_norm(c.contiguous()),
        )

    def _scan(self, inputs: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        config, own = self._config, self._own.size
        size, count, _ = inputs.shape
        known = states.index_select(0, slots)
        kept = own * (config.taps - 1)
        before, memory = torch.split(known, [kept, known.shape[1] - kept], 1)
        convolved, last = convolve(inputs, before.view(size, own, -1), self._convolution[:, 0], self._bias)
        x = F.silu(convolved)
        step, b, c = (each.float().view(size, count, -1) for each in self._projected(x.flatten(0, 1)))
        step = F.softplus(step)[..., None]
        rates = -self._decay.exp()
        memory = memory.view(size, own, config.state_size)
        outs = []
        for at in range(count):
            moved = step[:, at]
            memory = (moved * rates).exp() * memory + moved * x[:, at, :, None] * b[:, at, None]
            outs.append((memory * c[:, at, None]).sum(-1))
        states.index_copy_(0, slots, torch.cat((last.flatten(1), memory.flatten(1)), 1))
        return torch.stack(outs, 1) + self._skip * x
