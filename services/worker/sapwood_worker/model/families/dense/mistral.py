"""Mistral and Ministral: Llama's layers, with a window over all or some of them."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues


def _from_hf(found: HfValues) -> ModelConfig:
    kinds = found.values.get("layer_types")
    windows = found.one_window() if kinds is None else found.windows(kinds)
    return replace(found.llama(), windows=windows)


MISTRAL = ModelFamily(
    name="mistral",
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    classifiers=("MistralForSequenceClassification", "MinistralForSequenceClassification"),
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": False, "rope_theta": 10_000.0, "sliding_window": 4096},
    from_hf=_from_hf,
    from_gguf=None,  # such files call it llama
)
