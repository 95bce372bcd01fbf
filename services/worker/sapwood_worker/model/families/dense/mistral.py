"""Mistral: Llama's layers, with a window over all of them in its first versions."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.llama import LlamaDecoderLayer


def _from_hf(found: HfValues) -> ModelConfig:
    config, window = found.llama(), found.values.get("sliding_window")
    return config if window is None else replace(config, windows=(int(window),) * config.num_layers)


MISTRAL = ModelFamily(
    name="mistral",
    architectures=("MistralForCausalLM",),
    classifiers=("MistralForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": False, "rope_theta": 10_000.0, "sliding_window": 4096},
    from_hf=_from_hf,
    from_gguf=None,  # such files call it llama
)
