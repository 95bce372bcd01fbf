"""gpt-oss: Llama's order of norms, every second layer with a window, sinks in attention, and experts that are held joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sapwood_kernels.experts.reference import ClampedGate
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues, read_routing
from sapwood_worker.model.layers.rotary import YarnScaling
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    config, values = found.llama(), found.values
    usual = [_KINDS[index % 2] for index in range(found.layers)]
    return replace(
        config,
        windows=found.windows(values.get("layer_types") or usual),
        attention_sinks=True,
        sparse=SparseConfig(
            read_routing(values, "num_local_experts", "num_experts_per_tok", renormalise=True),
            config.intermediate_size,
            router="router",
            router_bias=True,
            joined=ClampedGate(float(values["swiglu_alpha"]), float(values["swiglu_limit"])),
        ),
    )


def _from_gguf(values: GgufValues) -> ModelConfig:
    config, window = values.llama(), values.count("attention.sliding_window")
    [rope] = set(config.ropes)
    if rope is not None and isinstance(rope.scaling, YarnScaling):
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    sparse = values.experts(renormalise=True)
    return replace(
        config,
        ropes=(rope,) * config.num_layers,
        windows=tuple(window if _KINDS[index % 2] == "sliding_attention" else None for index in range(values.layers)),
        attention_sinks=True,
        sparse=replace(sparse, router="router", router_bias=True, joined=ClampedGate(_ALPHA, _LIMIT)),
    )


_KINDS = "sliding_attention", "full_attention"
_ALPHA, _LIMIT = 1.702, 7.0
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

GPT_OSS = ModelFamily(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    classifiers=("GptOssForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False,
        "rope_theta": 150_000.0,
        "rope_scaling": _YARN,
        "attention_bias": True,
        "head_dim": 64,
        "sliding_window": 128,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": _LIMIT,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
    },
    from_hf=_from_hf,
    from_gguf=_from_gguf,
    gguf_name="gpt-oss",
    gguf_names={"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
)
