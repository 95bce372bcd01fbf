"""Mixtral: Mistral's layers with a mixture of experts in each."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    config, values = found.llama(), found.values
    window = values.get("sliding_window")
    return replace(
        config,
        windows=(None if window is None else int(window),) * config.num_layers,
        sparse=SparseConfig(
            read_routing(values, "num_local_experts", "num_experts_per_tok", renormalise=True),
            config.intermediate_size,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    )


MIXTRAL = ModelFamily(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    classifiers=("MixtralForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    from_hf=_from_hf,
    from_gguf=None,
)
