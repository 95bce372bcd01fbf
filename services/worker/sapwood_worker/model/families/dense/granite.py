"""Granite 3 and 4, dense, and HyperCLOVA X: Llama's layers with factors on embedding, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.rotary import Angles


class GraniteDecoderLayer(LlamaDecoderLayer):
    """The outputs of attention and MLP are multiplied before they are added."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self._scale = config.residual_scale

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        hidden.add_(self.attention(hidden, self.before_attention, angles, plan), alpha=self._scale)
        return hidden.add_(self.mlp(hidden, self.before_mlp), alpha=self._scale)


class HyperClovaXDecoderLayer(GraniteDecoderLayer):
    """The outputs of attention and MLP are normed before they are multiplied."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.after_attention, self.after_mlp = self.norm("post_norm1"), self.norm("post_norm2")

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return (*LlamaDecoderLayer.norm_names(), "post_norm1", "post_norm2")

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        attended = self.attention(hidden, self.before_attention, angles, plan)
        hidden.add_(self.after_attention(attended), alpha=self._scale)
        return hidden.add_(self.after_mlp(self.mlp(hidden, self.before_mlp)), alpha=self._scale)


def _hyperclova_x(found: HfValues) -> ModelConfig:
    values, head_dim = found.values, found.head_dim
    if not values["use_post_norm"]:
        raise ValueError("use_post_norm false is not supported")
    # A file may say null, which is the scale that all models have.
    scale = values.get("attention_multiplier")
    return replace(
        found.llama(),
        embedding_scale=float(values["embedding_multiplier"]),
        attention_scale=head_dim**-0.5 if scale is None else float(scale),
        residual_scale=float(values["residual_multiplier"]),
        logit_scale=float(values["logits_scaling"]),
    )


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    return replace(
        found.llama(),
        embedding_scale=float(values["embedding_multiplier"]),
        attention_scale=float(values["attention_multiplier"]),
        residual_scale=float(values["residual_multiplier"]),
        logit_scale=1.0 / float(values["logits_scaling"]),
    )


def _from_gguf(values: GgufValues) -> ModelConfig:
    config = values.llama()
    return replace(
        config,
        embedding_scale=float(values.get("embedding_scale", 1.0)),
        attention_scale=float(values.get("attention.scale", config.attention_scale)),
        residual_scale=float(values.get("residual_scale", 1.0)),
        logit_scale=1.0 / float(values.get("logit_scale", 1.0)),
    )


GRANITE = ModelFamily(
    name="granite",
    architectures=("GraniteForCausalLM",),
    layer=GraniteDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "embedding_multiplier": 1.0, "attention_multiplier": 1.0,
        "residual_multiplier": 1.0, "logits_scaling": 1.0,
    },
    from_hf=_from_hf,
    from_gguf=_from_gguf,
    gguf_interleaves=True,
)  # fmt: skip
HYPERCLOVA_X = ModelFamily(
    name="hyperclovax",
    architectures=("HyperCLOVAXForCausalLM",),
    layer=HyperClovaXDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "logits_scaling": 1.0, "use_post_norm": True,
    },
    from_hf=_hyperclova_x,
    from_gguf=None,
)  # fmt: skip
