"""RMSNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots


class RMSNorm(Layer):
    """Root-mean-square norm: ``sapwood_kernels.reference.rms_norm``.

    The weight is float32 whatever the model's dtype, and is the factor itself: for Gemma, 1 + w.

    Args:
        width: Numbers that are normed together.
        eps: Added to the mean square.
        context: Where and how it is built.
    """

    def __init__(self, width: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        empty = torch.empty(width, dtype=torch.float32, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps
        self._context = context
        self._norm: Callable[[Tensor], Tensor]

    def slots(self) -> WeightSlots:
        return {f"{self._context.prefix}.weight": WeightSlot(self.weight, norm=True)}

    def finish(self) -> None:
        self._norm = self._context.ops.rms_norm(self.weight, self.eps, self._context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        return self._norm(x)
