"""Orders of norms, attention and MLP in a layer, other than Llama's."""

from __future__ import annotations

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.rotary import Angles


class SandwichDecoderLayer(DecoderLayer):
    """Norms before and after attention and MLP, in the order of :meth:`norm_names`, which are Gemma's."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = map(self.norm, self.norm_names())

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        hidden += self.after_attention(self.attention(hidden, self.before_attention, angles, plan))
        hidden += self.after_mlp(self.mlp(hidden, self.before_mlp))
        return hidden


class PostNormDecoderLayer(DecoderLayer):
    """Norms after attention and MLP only."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.after_attention, self.after_mlp = map(self.norm, self.norm_names())

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        hidden += self.after_attention(self.attention(hidden, None, angles, plan))
        hidden += self.after_mlp(self.mlp(hidden, None))
        return hidden


class ParallelDecoderLayer(DecoderLayer):
    """Attention and MLP both take what one norm gives."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.first_norm = self.before = self.norm("input_layernorm")

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm",)

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        normed = self.before(hidden)
        self.attention(normed, None, angles, plan, hidden)
        self.mlp(normed, None, hidden)
        return hidden
