"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
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


class LayerNorm(Layer):
    """Norm with the mean taken away, in float32. Source: Ba et al., "Layer Normalization", 2016.

    The weight is the factor itself: for Nemotron, 1 + w.

    Args:
        width: Numbers that are normed together.
        eps: Added to the variance.
        bias: Whether a bias is added.
        context: Where and how it is built.
    """

    def __init__(self, width: int, eps: float, context: LayerContext, *, bias: bool) -> None:
        super().__init__()
        stored = torch.zeros(2, width, dtype=torch.float32, device=context.device)
        self._stored = nn.Parameter(stored, requires_grad=False)
        self._eps, self._has_bias, self._prefix = eps, bias, context.prefix

    def slots(self) -> WeightSlots:
        slots = {f"{self._prefix}.weight": WeightSlot(self._stored[0], norm=True)}
        if self._has_bias:
            slots[f"{self._prefix}.bias"] = WeightSlot(self._stored[1])
        return slots

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        weight, bias = self._stored
        return F.layer_norm(x.float(), weight.shape, weight, bias, self._eps).to(x.dtype)


AnyNorm = RMSNorm | LayerNorm
