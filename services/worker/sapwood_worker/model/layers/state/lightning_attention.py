"""Lightning attention of MiniMax: linear attention whose heads each forget at a rate of their own.

It is the recurrence of Mamba 2 (``mamba2.py``) with values for inputs, keys and queries for ``b`` and ``c``, and the same step
for every token.

Source: Qin et al., "Lightning Attention-2", 2024; MiniMax, "MiniMax-01", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.state.contracts import Slots, SpaceShape, StateSteps
from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import AnyNorm
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.layers.state.mamba2 import state_space
from sapwood_worker.model.layers.state.state_layer import StateLayer
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots

_EPS = 1e-6
"""Of the norm behind, whatever the model's others have."""


@dataclass(frozen=True, slots=True)
class LightningConfig:
    """Implements :class:`sapwood_worker.model.layers.state.state_layer.StateConfig`.

    Attributes:
        heads: Heads.
        dim: Elements of a head.
        layers: The model's layers: later ones forget more slowly.
        name: What checkpoints call the layer.
    """

    heads: int
    dim: int
    layers: int
    name: str = "self_attn"

    @property
    def numbers(self) -> int:
        return self.heads * self.dim * self.dim

    def rates(self, index: int) -> Tensor:
        """The logarithm of each head's factor of a token, float32 [heads], in a layer."""
        slope = 2 ** (-8 * torch.arange(1, self.heads + 1) / self.heads)
        return -slope * (1 - index / (self.layers - 1 + 1e-5) + 1e-5)

    def build(self, hidden_size: int, index: int, context: LayerContext) -> StateLayer:
        return LightningAttention(self, hidden_size, index, context)


class LightningAttention(StateLayer):
    """Projections with an activation, linear attention, a norm of all heads together, and a gate. Heads are split over the ranks.

    Args:
        config: Its sizes.
        hidden_size: Width in and out.
        index: The layer's.
        context: Where and how it is built.
    """

    def __init__(self, config: LightningConfig, hidden_size: int, index: int, context: LayerContext) -> None:
        super().__init__()
        self._config, self._index, self._prefix = config, index, context.prefix
        shard = context.parallel.shard
        self._own, self._inner = (shard("num_attention_heads", config.heads, size) for size in (1, config.dim))
        joined = shard("num_attention_heads", config.heads, 3 * config.dim)
        self.inputs = ColumnLinear(hidden_size, {"qkv_proj": joined}, False, context)
        self.gate = ColumnLinear(hidden_size, {"output_gate": self._inner}, False, context)
        self.output = RowLinear(self._inner, "out_proj", hidden_size, False, context)
        self.ranks = self.output.ranks
        self._group, self._ops = context.split_over, context.ops
        self._norm = torch.empty(self._inner.size, dtype=torch.float32, device=context.device)
        self._rates = config.rates(index)[self._own.slice].to(context.device)

    def slots(self) -> WeightSlots:
        return {f"{self._prefix}.norm.weight": WeightSlot(self._norm, spans=(self._inner,))}

    def forward(
        self,
        hidden: Tensor,
        norm: AnyNorm | None,
        angles: Angles,
        plan: AttentionPlan,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert plan.states is not None
        normed = hidden if norm is None else norm(hidden)
        qkv, gate = self.inputs(normed, None), self.gate(normed, None)
        mixed = plan.states.step(self._index, self._ops, partial(self._step, qkv))
        if mixed is None:
            mixed = plan.states.scan(self._index, F.silu(qkv).float(), self._inner.size, self._scan)
        if self._group is None:
            out = self._ops.gated_norm(mixed, gate, self._norm, _EPS, 1, "norm first", hidden.dtype, sigmoid=True)
        else:
            means = self._group.all_reduce(mixed.square().sum(-1, keepdim=True) / self._inner.total)
            mixed = mixed * torch.rsqrt(means + _EPS) * self._norm
            out = (mixed * gate.float().sigmoid()).to(hidden.dtype)
        result: Tensor = self.output(out, None, residual)
        return result

    def _step(self, qkv: Tensor, steps: StateSteps, slots: Slots) -> Tensor:
        heads, dim = self._own.size, self._config.dim
        return steps.linear(qkv, slots, self._rates, SpaceShape(heads, heads, dim, dim))

    def _scan(self, inputs: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        size, count, _ = inputs.shape
        heads, dim = self._own.size, self._config.dim
        q, k, v = inputs.view(size, count, heads, 3 * dim).chunk(3, 3)
        memory = states.index_select(0, slots).view(size, heads, dim, dim)
        out, memory = state_space(v, q.new_ones(size, count, heads), self._rates, k, q, memory)
        states.index_copy_(0, slots, memory.flatten(1))
        return out.flatten(2)
