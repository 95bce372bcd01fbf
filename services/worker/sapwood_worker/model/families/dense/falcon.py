"""Falcon 7B, 11B, 40B and 180B: attention and MLP side by side after one LayerNorm or after one each, keys and values shared."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.family import ModelFamily, fused_qkv
from sapwood_worker.model.families.values import HfValues, check_count
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.mlp import PlainConfig
from sapwood_worker.model.layers.norm import LayerNorm
from sapwood_worker.model.layers.rotary import Angles


class FalconDecoderLayer(DecoderLayer):
    """Attention and MLP side by side: with a norm each where ``config.parallel`` is false, else with one for both."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        names = ("input_layernorm",) if config.parallel else ("ln_attn", "ln_mlp")
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norms = nn.ModuleDict({name: LayerNorm(width, eps, context.inside(name), bias=True) for name in names})
        self.first_norm = self.before_attention = self.norm(names[0])
        self.before_mlp = self.norm(names[-1])

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ()

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        normed = self.before_attention(hidden)
        other = normed if self.before_mlp is self.before_attention else self.before_mlp(hidden)
        self.attention(normed, None, angles, plan, hidden)
        self.mlp(other, None, hidden)
        return hidden


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    if values["alibi"]:
        raise ValueError("alibi is not supported: positions are rotary embeddings")
    if not values["parallel_attn"]:
        raise ValueError("parallel_attn false is not supported")
    heads, new = int(values["num_attention_heads"]), bool(values["new_decoder_architecture"])
    shared = 1 if values["multi_query"] and not new else values.get("num_kv_heads") or heads
    check_count("num_kv_heads", shared, 1)
    values.idle("num_kv_heads", "multi_query", "num_ln_in_parallel_attn")
    inner = values.get("ffn_hidden_size")
    if inner is not None:
        check_count("ffn_hidden_size", inner, 1)
    changes = {"num_key_value_heads": shared, "intermediate_size": inner or 4 * int(values["hidden_size"])}
    bias = bool(values["bias"])
    norms = values.get("num_ln_in_parallel_attn") or 2
    return replace(
        replace(found, values=values.but(changes)).llama(gated=False),
        norm="layer",
        norm_bias=True,
        rms_norm_eps=float(values["layer_norm_epsilon"]),
        plain_mlp=PlainConfig(found.plain_activation("activation"), "dense_h_to_4h", "dense_4h_to_h"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        parallel=not new or norms == 1,
    )


FALCON = ModelFamily(
    name="falcon",
    architectures=("FalconForCausalLM",),
    classifiers=("FalconForSequenceClassification",),
    layer=FalconDecoderLayer,
    defaults={
        "tie_word_embeddings": True, "rope_theta": 10_000.0, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048,
        "activation": "gelu", "alibi": False, "parallel_attn": True, "new_decoder_architecture": False, "multi_query": True,
        "bias": False, "vocab_size": 65_024,
    },
    from_hf=_from_hf,
    from_gguf=None,
    prefixes={
        "transformer.h.": "model.layers.", "transformer.word_embeddings.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.", "lm_head.": "lm_head.",
    },
    renamed={
        "self_attention.query_key_value": "self_attn.query_key_value", "self_attention.dense": "self_attn.o_proj",
    },
    fused=lambda config: fused_qkv(config, "query_key_value"),
    groups=lambda config: config.num_kv_heads,
    unread={"hidden_dropout": (), "apply_residual_connection_post_layernorm": (False,), "n_embed": ()},
)  # fmt: skip
