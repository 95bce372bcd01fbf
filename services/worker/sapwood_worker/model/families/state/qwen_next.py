"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.sparse.qwen_moe import read_qwen_experts
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig
from sapwood_worker.model.layers.state.gated_delta_net import GatedDeltaConfig

_DEFAULTS = {
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip


def _mixed(found: HfValues, *, joined: bool) -> ModelConfig:
    """What the family's members have in common."""
    values = found.values
    kinds = values.get("layer_types")
    if kinds is None:
        every = int(values.get("full_attention_interval", 4))
        kinds = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(found.layers)]
    else:
        values.idle("full_attention_interval")
    if len(kinds) != found.layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise ValueError(f"layer_types has to say linear_attention or full_attention for each of {found.layers} layers")
    config = replace(found.llama(), qk_norm=True, attention_gate=True, norm_offset=1.0)
    delta = GatedDeltaConfig(
        key_heads=int(values["linear_num_key_heads"]),
        value_heads=int(values["linear_num_value_heads"]),
        key_dim=int(values["linear_key_head_dim"]),
        value_dim=int(values["linear_value_head_dim"]),
        taps=int(values["linear_conv_kernel_dim"]),
        eps=config.rms_norm_eps,
        joined=joined,
    )
    if delta.value_heads % delta.key_heads:
        raise ValueError(
            f"linear_num_value_heads {delta.value_heads} is no multiple of linear_num_key_heads {delta.key_heads}"
        )
    return replace(
        config,
        attending=tuple(kind == "full_attention" for kind in kinds),
        states=tuple(delta if kind == "linear_attention" else None for kind in kinds),
    )


def _next(found: HfValues) -> ModelConfig:
    shared = SharedExpert("shared_expert", int(found.values["shared_expert_intermediate_size"]), gated=True)
    return replace(_mixed(found, joined=True), sparse=replace(read_qwen_experts(found), shared=shared))


def _fused(config: ModelConfig) -> FusedRows:
    """The channels of the convolution are those of queries, keys and values, one after the other."""
    delta = next(each for each in config.states if isinstance(each, GatedDeltaConfig))
    fused = {"linear_attn.conv1d": {f"linear_attn.conv_{name}": size for name, size in delta.convolved.items()}}
    if not delta.joined:
        fused["linear_attn.in_proj_qkv"] = {
            f"linear_attn.in_proj_{name}": size for name, size in delta.convolved.items()
        }
    return fused


def _fused_experts(config: ModelConfig) -> FusedRows:
    assert config.sparse is not None
    inner = config.sparse.intermediate_size
    return {
        **_fused(config),
        "mlp.experts.gate_up_proj": {"mlp.experts.gate_proj": inner, "mlp.experts.up_proj": inner},
    }


def _dense(found: HfValues) -> ModelConfig:
    return _mixed(found, joined=False)


def _sparse(found: HfValues) -> ModelConfig:
    values = found.values
    shared = SharedExpert("shared_expert", int(values["shared_expert_intermediate_size"]), gated=True)
    routing = read_routing(values, "num_experts", "num_experts_per_tok", renormalise=True)
    sparse = SparseConfig(routing, int(values["moe_intermediate_size"]), shared=shared, stacked="rows")
    values = values.but({"intermediate_size": 1})  # no layer has an MLP alone
    return replace(_mixed(replace(found, values=values), joined=False), sparse=sparse)


QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
    from_hf=_next,
    from_gguf=None,
    fused=_fused,
)  # fmt: skip


QWEN3_5 = ModelFamily(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "max_position_embeddings": 32_768},
    from_hf=_dense,
    from_gguf=None,
    fused=_fused,
)


QWEN3_5_MOE = ModelFamily(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "max_position_embeddings": 32_768,
    },
    from_hf=_sparse,
    from_gguf=None,
    fused=_fused_experts,
    by_rows=True,
)  # fmt: skip
