"""Jamba: layers of Mamba 1, attention in every few, and mixtures of experts in every other one."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig
from sapwood_worker.model.layers.state.mamba1 import Mamba1Config


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    config, count = found.llama(), found.layers
    rank = values["mamba_dt_rank"]
    mamba = Mamba1Config(
        int(values["mamba_expand"]) * config.hidden_size,
        int(values["mamba_d_state"]),
        int(values["mamba_d_conv"]),
        -(-config.hidden_size // 16) if rank == "auto" else int(rank),
        config.rms_norm_eps,
        convolution_bias=bool(values["mamba_conv_bias"]),
        bias=bool(values["mamba_proj_bias"]),
    )
    period, offset = int(values["attn_layer_period"]), int(values["attn_layer_offset"])
    whole = tuple(index % period == offset for index in range(count))
    sparse = None
    if int(values["num_experts"]) > 1:
        period, offset = int(values["expert_layer_period"]), int(values["expert_layer_offset"])
        sparse = SparseConfig(
            read_routing(values, "num_experts", "num_experts_per_tok", renormalise=False),
            config.intermediate_size,
            dense_layers=frozenset(index for index in range(count) if index % period != offset),
            router="router",
        )
    else:
        values.idle("num_experts_per_tok", "expert_layer_period", "expert_layer_offset")
    return replace(
        config,
        ropes=(None,) * count,
        sparse=sparse,
        attending=whole,
        states=tuple(None if each else mamba for each in whole),
    )


def _fused(config: ModelConfig) -> FusedRows:
    return next(each for each in config.states if isinstance(each, Mamba1Config)).fused


JAMBA = ModelFamily(
    name="jamba",
    architectures=("JambaForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144,
        "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
    from_hf=_from_hf,
    from_gguf=None,
    renamed={"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"},
    fused=_fused,
    unread={
        "use_mamba_kernels": (), "use_mambapy": (), "use_associative_scan": (), "num_logits_to_keep": (),
        "mamba_inner_layernorms": (True,),
        "calc_logits_for_entire_prompt": (), "layers_block_type": (), "layer_types": ("linear_attention", "full_attention"),
        "layers_num_experts": (),
    },
)  # fmt: skip
