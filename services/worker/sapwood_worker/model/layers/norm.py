"""RMSNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.weight_slot import WeightSlot, WeightSlots


class RMSNorm(Layer):
    """Root-mean-square norm: ``sapwood_kernels.reference.rms_norm``.

    The weight is float32 whatever the model's dtype, and is the factor itself: for Gemma, 1 + w.

    Args:
        width: Numbers that are normed together.
        eps: Added to the mean square.
        ops: The operations of the device, where the weight lies.
    """

    def __init__(self, width: int, eps: float, ops: DeviceOps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32, device=ops.device), requires_grad=False)
        self.eps = eps
        self._ops = ops
        self._norm: Callable[[Tensor], Tensor]

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        return {f"{prefix}.weight": WeightSlot(self.weight, norm=True)}

    def prepare(self, dtype: torch.dtype) -> None:
        """Readies the weights for use; called once when they are loaded."""
        self._norm = self._ops.rms_norm(self.weight, self.eps, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        return self._norm(x)
