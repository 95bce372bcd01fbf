"""RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sapwood_kernels import cpu, reference
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.weight_slot import WeightSlot, WeightSlots


class RMSNorm(Layer):
    """Root-mean-square norm: ``sapwood_kernels.reference.rms_norm``.

    The weight is float32 whatever the model's dtype, and is the factor itself: for Gemma, 1 + w.

    Args:
        shape: The weight's shape; the norm is over its last dimension.
        eps: Added to the mean square.
        device: Where the weight lies.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)
        self.eps = eps
        self._fast: Callable[[Tensor], Tensor] | None = None

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        return {f"{prefix}.weight": WeightSlot(self.weight, norm=True)}

    def prepare(self, dtype: torch.dtype) -> None:
        """Readies the weights for use; called once when they are loaded."""
        if self.weight.device.type == "cpu" and dtype == torch.float32:
            self._fast = cpu.RmsNorm(self.weight, self.eps)
        elif self.weight.device.type == "cuda" and self.weight.dim() == 1:
            from sapwood_kernels.triton_norm import rms_norm  # only CUDA builds of torch have triton

            self._fast = partial(rms_norm, weight=self.weight, eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        if self._fast is not None:
            return self._fast(x)
        return reference.rms_norm(x, self.weight, self.eps)
