"""Gemma 3, text only."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_worker.attention.backend import AttentionPlan
from sapwood_worker.models.config import ModelConfig
from sapwood_worker.models.decoder import Angles, DecoderLayer


class Gemma3DecoderLayer(DecoderLayer):
    """Norms before and after attention and MLP.

    Args:
        config: The model's.
        index: Which layer.
        dtype: Of weights and activations.
        device: Where the weights lie.
    """

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, index, dtype, device)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = map(self.norm, self.norm_names())

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        """See :class:`DecoderLayer`."""
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """See :class:`DecoderLayer`."""
        hidden += self.after_attention(self.attention(hidden, self.before_attention, angles, plan))
        hidden += self.after_mlp(self.mlp(hidden, self.before_mlp))
        return hidden
