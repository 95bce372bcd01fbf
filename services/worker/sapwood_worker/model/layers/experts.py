"""The experts of a layer, stacked."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.experts.stack import DenseStack
from sapwood_kernels.ops.device import ExpertSum, Gate
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots, whole


class Experts(Layer):
    """The weighted sum of each token's experts, gated MLPs without biases; their width is split over the ranks.

    The matrices of all experts are two tensors, and each tensor of the checkpoint is read into its place there.

    Args:
        hidden_size: Width in and out.
        intermediate_size: Width of an expert's gate and up.
        count: How many experts there are.
        projections: What checkpoints call an expert's gate, up and down.
        activation: Of the gate.
        context: Where and how it is built.

    Raises:
        ConfigError: The checkpoint stores them in a format that cannot be read, or they are to be quantised.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        count: int,
        *,
        projections: tuple[str, str, str],
        activation: Gate,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._context, self._projections, self._activation = context, projections, activation
        self._inner = context.parallel.shard("moe_intermediate_size", intermediate_size)
        names = (f"{context.prefix}.{index}.{each}" for index in range(count) for each in projections)
        context.linear.check_experts(names)

        def empty(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=context.dtype, device=context.device)

        self._gate_up = empty(count, 2 * self._inner.size, hidden_size)
        self._down = empty(count, hidden_size, self._inner.size)
        self._sum: ExpertSum

    def slots(self) -> WeightSlots:
        slots: WeightSlots = {}
        gate, up, down = self._projections
        inner, outer = self._inner, whole(self._down.shape[1])
        for index, (gate_up, matrix) in enumerate(zip(self._gate_up, self._down, strict=True)):
            name = f"{self._context.prefix}.{index}"
            slots[f"{name}.{gate}.weight"] = WeightSlot(gate_up[: inner.size], spans=(inner, outer))
            slots[f"{name}.{up}.weight"] = WeightSlot(gate_up[inner.size :], spans=(inner, outer))
            slots[f"{name}.{down}.weight"] = WeightSlot(matrix, spans=(outer, inner))
        return slots

    def finish(self) -> None:
        stacks = DenseStack(self._gate_up), DenseStack(self._down)
        self._sum = self._context.ops.expert_sum(*stacks, self._activation)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden_size] and what the router chose, [T, k] each -> [T, hidden_size], this rank's part of the sum."""
        return self._sum(x, ids, weights)
