"""Llama 2 and 3. Others have its layers, too, and differ in their configuration."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.values import GgufValues, gguf_llama
from sapwood_worker.model.layers.layer import LayerContext
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


def _from_gguf(values: GgufValues) -> ModelConfig:
    config = values.llama()
    # Files of Mixtral, and of Llamas joined to a mixture of experts, are called so, too.
    return replace(config, sparse=values.experts(renormalise=True)) if values.get("expert_count", 0) else config


LLAMA = ModelFamily(
    name="llama",
    architectures=("LlamaForCausalLM",),
    classifiers=("LlamaForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": False, "rope_theta": 10_000.0},
    from_gguf=_from_gguf,
    to_gguf=gguf_llama,
    gguf_interleaves=True,
)
