"""GPT-NeoX (Pythia, Dolly): two LayerNorms of a layer's input, for attention and MLP side by side; a quarter of a head turned."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.family import ModelFamily, fused_qkv
from sapwood_worker.model.families.known_keys import Same
from sapwood_worker.model.families.values import HfValues
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.mlp import PlainConfig
from sapwood_worker.model.layers.rotary import Angles


class TwoNormDecoderLayer(DecoderLayer):
    """Attention and MLP with a norm each, of the layer's input or one after the other."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self._parallel = config.parallel
        self.first_norm = self.before_attention = self.norm("input_layernorm")
        self.before_mlp = self.norm("post_attention_layernorm")

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm", "post_attention_layernorm")

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        normed = self.before_mlp(hidden) if self._parallel else None
        self.attention(hidden, self.before_attention, angles, plan, hidden)
        if normed is None:
            self.mlp(hidden, self.before_mlp, hidden)
        else:
            self.mlp(normed, None, hidden)
        return hidden


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    part = float(rope.pop("partial_rotary_factor", values.get("partial_rotary_factor", values["rotary_pct"])))
    theta = float(rope.get("rope_theta", values["rotary_emb_base"]))
    found = replace(
        found, values=values.but({"partial_rotary_factor": part, "rope_theta": theta, "num_key_value_heads": None})
    )
    bias = bool(values["attention_bias"])
    return replace(
        found.llama(gated=False),
        norm="layer",
        norm_bias=True,
        rms_norm_eps=float(values["layer_norm_eps"]),
        plain_mlp=PlainConfig(found.plain_activation("hidden_act"), "dense_h_to_4h", "dense_4h_to_h"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        parallel=bool(values["use_parallel_residual"]),
    )


GPT_NEOX = ModelFamily(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    classifiers=("GPTNeoXForSequenceClassification",),
    layer=TwoNormDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rotary_emb_base": 10_000.0, "rotary_pct": 0.25, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True,
        "vocab_size": 50_432,
    },
    from_hf=_from_hf,
    from_gguf=None,
    prefixes={
        "gpt_neox.embed_in.": "model.embed_tokens.", "gpt_neox.layers.": "model.layers.",
        "gpt_neox.final_layer_norm.": "model.norm.", "embed_out.": "lm_head.", "lm_head.": "lm_head.",
    },
    renamed={
        "attention.query_key_value": "self_attn.query_key_value", "attention.dense": "self_attn.o_proj",
    },
    fused=lambda config: fused_qkv(config, "query_key_value"),
    groups=lambda config: config.num_heads,
    unread={
        "rope_theta": Same("rotary_emb_base", 10_000.0), "hidden_dropout": (), "classifier_dropout": (), "is_decoder": (),
        "gradient_checkpointing": (),
    },
)  # fmt: skip
