"""Seed-OSS: Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues


def _from_hf(found: HfValues) -> ModelConfig:
    return replace(found.llama(), output_bias=bool(found.values["attention_out_bias"]))


SEED_OSS = ModelFamily(
    name="seed_oss",
    unread={"residual_dropout": ()},
    architectures=("SeedOssForCausalLM",),
    classifiers=("SeedOssForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "head_dim": 128, "attention_bias": True,
        "attention_out_bias": False, "max_position_embeddings": 524_288,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
