"""OLMoE and FlexOlmo: Llama's and OLMo 2's layers with experts of softmax scores, queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import PostNormDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    config, values = found.llama(), found.values
    clip = values.get("clip_qkv")
    experts = "num_local_experts" if values.get("num_local_experts") else "num_experts"  # newer files have the first
    routing = read_routing(values, experts, "num_experts_per_tok", renormalise=bool(values["norm_topk_prob"]))
    return replace(
        config,
        qk_norm=True,
        qk_norm_kind="width",
        clip_qkv=None if clip is None else float(clip),
        sparse=SparseConfig(routing, config.intermediate_size),
    )


def _from_gguf(values: GgufValues) -> ModelConfig:
    return replace(values.llama(), qk_norm=True, qk_norm_kind="width", sparse=values.experts(renormalise=False))


_DEFAULTS = {"tie_word_embeddings": False, "norm_topk_prob": False}

OLMOE = ModelFamily(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
    },
    from_hf=_from_hf,
    from_gguf=_from_gguf,
)  # fmt: skip
FLEX_OLMO = ModelFamily(
    name="flex_olmo",
    architectures=("FlexOlmoForCausalLM",),
    layer=PostNormDecoderLayer,
    defaults={**_DEFAULTS, "rope_theta": 500_000.0, "num_experts": 7, "num_experts_per_tok": 5},
    from_hf=_from_hf,
    from_gguf=None,
)
