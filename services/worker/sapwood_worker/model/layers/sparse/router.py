"""The router of a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots

_CORRECTION = "e_score_correction_bias"


class Router(Layer):
    """Chooses each token's experts. It computes in float32: experts whose scores are near each other are not to change places.

    Args:
        hidden_size: Width of the input.
        routing: How experts are chosen.
        bias: Whether its logits have a bias.
        correction: Whether scores are corrected where experts are chosen.
        context: Where and how it is built.

    Attributes:
        counts: int64 [E], on the device: how many tokens have gone to each expert.
    """

    def __init__(
        self, hidden_size: int, routing: Routing, *, bias: bool, correction: bool, context: LayerContext
    ) -> None:
        super().__init__()
        self._prefix = context.prefix

        def empty(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=context.device)

        self.counts = torch.zeros(routing.experts, dtype=torch.int64, device=context.device)
        self._weight = empty(routing.experts, hidden_size)
        self._bias = empty(routing.experts) if bias else None
        self._correction = empty(routing.experts) if correction else None
        self._route = context.ops.router(routing, self._correction, self.counts)

    def slots(self) -> WeightSlots:
        named = {"weight": self._weight, "bias": self._bias, _CORRECTION: self._correction}
        return {f"{self._prefix}.{name}": WeightSlot(each) for name, each in named.items() if each is not None}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] -> each token's experts, integers [T, k], and their weights, float32 [T, k]."""
        return self._route(F.linear(x.float(), self._weight, self._bias))
