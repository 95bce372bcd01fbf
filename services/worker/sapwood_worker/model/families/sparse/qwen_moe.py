"""Qwen2 and Qwen3 with mixtures of experts; Qwen2's have a shared expert, too. Qwen3-VL's files have them in one tensor."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig

_DEFAULTS = {
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}


def read_qwen_experts(found: HfValues) -> SparseConfig:
    """The mixtures of experts of ``config.json``, without a shared expert."""
    values = found.values
    experts = "num_local_experts" if values.get("num_local_experts") else "num_experts"  # newer files have the first
    step, dense = int(values["decoder_sparse_step"]), values.get("mlp_only_layers") or ()
    return SparseConfig(
        read_routing(values, experts, "num_experts_per_tok", renormalise=bool(values["norm_topk_prob"])),
        int(values["moe_intermediate_size"]),
        dense_layers=frozenset(index for index in range(found.layers) if index in dense or (index + 1) % step),
    )


def _qwen2(found: HfValues) -> ModelConfig:
    values = found.values
    windows: tuple[int | None, ...] = (None,) * found.layers
    if not values.get("use_sliding_window"):
        values.idle("sliding_window", "layer_types")
    else:
        first = int(values["max_window_layers"])
        usual = [
            "full_attention" if index % 2 or index >= first else "sliding_attention" for index in range(found.layers)
        ]
        windows = found.windows(values.get("layer_types") or usual)
    shared = SharedExpert("shared_expert", int(values["shared_expert_intermediate_size"]), gated=True)
    return replace(
        found.llama(),
        windows=windows,
        qkv_bias=bool(values["qkv_bias"]),
        sparse=replace(read_qwen_experts(found), shared=shared),
    )


def _qwen3(found: HfValues) -> ModelConfig:
    values = found.values
    window = int(values["sliding_window"]) if values.get("use_sliding_window") else None
    if window is None:
        values.idle("sliding_window", "layer_types")
    return replace(found.llama(), windows=(window,) * found.layers, qk_norm=True, sparse=read_qwen_experts(found))


def _qwen3_vl(found: HfValues) -> ModelConfig:
    found.values.idle("sliding_window")
    return replace(found.llama(), qk_norm=True, sparse=replace(read_qwen_experts(found), stacked="transposed"))


def _fused(config: ModelConfig) -> FusedRows:
    """Experts' gate and up lie side by side."""
    assert config.sparse is not None
    inner = config.sparse.intermediate_size
    return {"mlp.experts.gate_up_proj": {"mlp.experts.gate_proj": inner, "mlp.experts.up_proj": inner}}


def _qwen2_gguf(values: GgufValues) -> ModelConfig:
    shared = SharedExpert("shared_expert", values.count("expert_shared_feed_forward_length"), gated=True)
    return replace(values.llama(), qkv_bias=True, sparse=values.experts(renormalise=False, shared=shared))


def _qwen3_gguf(values: GgufValues) -> ModelConfig:
    return replace(values.llama(), qk_norm=True, sparse=values.experts(renormalise=True))


QWEN2_MOE = ModelFamily(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    classifiers=("Qwen2MoeForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS,
        "qkv_bias": True,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    from_hf=_qwen2,
    from_gguf=_qwen2_gguf,
    gguf_name="qwen2moe",
    gguf_names={
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    },
)
QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    unread={"use_qk_norm": (True,)},
    architectures=("Qwen3MoeForCausalLM",),
    classifiers=("Qwen3MoeForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    from_hf=_qwen3,
    from_gguf=_qwen3_gguf,
    gguf_name="qwen3moe",
)
QWEN3_VL_MOE = ModelFamily(
    name="qwen3_vl_moe_text",
    architectures=("Qwen3VLMoeTextModel",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS,
        "rope_theta": 500_000.0,
        "norm_topk_prob": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
    from_hf=_qwen3_vl,
    from_gguf=None,
    fused=_fused,
)
