"""The activation of gpt-oss's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped inputs that take turns: gate, up, gate, up.

    Attributes:
        alpha: Gain of the sigmoid.
        limit: The gate is at most this, up is between minus this and this.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, 2N] -> [T, N]."""
        gate, up = gate_up[:, ::2].clamp(max=self.limit), gate_up[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)
