"""Llama 2 and 3. Others have its layers, too, and differ in their configuration."""

from __future__ import annotations

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.rotary import Angles


class LlamaDecoderLayer(DecoderLayer):
    """Norms before attention and MLP."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.first_norm = self.before_attention = self.norm("input_layernorm")
        self.before_mlp = self.norm("post_attention_layernorm")
        if self.attention.ranks is not None:
            self.attention.ranks.norm_follows(self.before_mlp)

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm", "post_attention_layernorm")

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        self.attention(hidden, self.before_attention, angles, plan, hidden)
        self.mlp(hidden, self.before_mlp, hidden)
        return hidden


LLAMA = ModelFamily(
    name="llama",
    architectures=("LlamaForCausalLM",),
    classifiers=("LlamaForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": False, "rope_theta": 10_000.0},
    gguf_interleaves=True,
)
