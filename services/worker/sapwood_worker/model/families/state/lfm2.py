"""LFM2: short convolutions, and grouped attention in every few layers; with mixtures of experts in the larger ones."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig
from sapwood_worker.model.layers.state.short_convolution import ShortConvolutionConfig
from sapwood_worker.model.layers.state.state_layer import StateConfig

_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "embedding_norm": "norm",
}
_DEFAULTS = {
    "tie_word_embeddings": True, "rope_theta": 1_000_000.0, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
    "num_key_value_heads": 8, "max_position_embeddings": 128_000,
}  # fmt: skip


def _mixed(found: HfValues) -> ModelConfig:
    """What both have in common."""
    values = found.values
    kinds = values.get("layer_types")
    if kinds is None:
        whole = values.get("full_attn_idxs")
        attending = range(found.layers) if whole is None else list(whole)
        kinds = ["full_attention" if index in attending else "conv" for index in range(found.layers)]
    else:
        values.idle("full_attn_idxs")
    if len(kinds) != found.layers or not set(kinds) <= {"conv", "full_attention"}:
        raise ValueError(f"layer_types has to say conv or full_attention for each of {found.layers} layers")
    width = int(values["hidden_size"])
    convolution: StateConfig = ShortConvolutionConfig(width, int(values["conv_L_cache"]), bool(values["conv_bias"]))
    return replace(
        found.llama(),
        rms_norm_eps=float(values["norm_eps"]),
        qk_norm=True,
        attending=tuple(kind == "full_attention" for kind in kinds),
        states=tuple(convolution if kind == "conv" else None for kind in kinds),
    )


def _fused(config: ModelConfig) -> FusedRows:
    """The projections before the convolution lie one after the other."""
    return {"conv.in_proj": dict.fromkeys(("conv.in_proj_b", "conv.in_proj_c", "conv.in_proj_x"), config.hidden_size)}


def _dense(found: HfValues) -> ModelConfig:
    values = found.values
    inner = int(values.get("block_ff_dim") or values["intermediate_size"])
    if values["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if values["block_ffn_dim_multiplier"] is not None:
            multiple = int(values["block_multiple_of"])
            inner = -(-int(float(values["block_ffn_dim_multiplier"]) * inner) // multiple) * multiple
    else:
        values.idle("block_ffn_dim_multiplier", "block_multiple_of")
    values.idle("intermediate_size", "block_dim", "conv_dim", "conv_dim_out", "block_mlp_init_scale")
    values.idle("block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init")
    values.idle("block_norm_eps", "num_heads", "use_pos_enc")
    return replace(_mixed(found), intermediate_size=inner)


def _sparse(found: HfValues) -> ModelConfig:
    values = found.values
    corrected = bool(values["use_expert_bias"])
    routing = read_routing(
        values, "num_experts", "num_experts_per_tok", scores="sigmoid", renormalise=bool(values["norm_topk_prob"]),
        scale=float(values["routed_scaling_factor"]),
    )  # fmt: skip
    sparse = SparseConfig(
        routing,
        int(values["moe_intermediate_size"]),
        dense_layers=frozenset(range(min(int(values["num_dense_layers"]), found.layers))),
        correction="expert_bias" if corrected else "",
    )
    return replace(_mixed(found), sparse=sparse)


LFM2_MOE = ModelFamily(
    name="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
        "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    },
    from_hf=_sparse,
    from_gguf=None,
    renamed={**_NAMES, "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "feed_forward": "mlp"},
    fused=_fused,
)  # fmt: skip


LFM2 = ModelFamily(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS, "intermediate_size": 12_288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    from_hf=_dense,
    from_gguf=None,
    renamed=_NAMES,
    fused=_fused,
)  # fmt: skip
