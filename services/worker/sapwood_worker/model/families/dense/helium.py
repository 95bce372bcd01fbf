"""Helium: Llama's layers, neighbours of a head turned together."""

from __future__ import annotations

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues


def _from_hf(found: HfValues) -> ModelConfig:
    return found.interleaved().llama()


HELIUM = ModelFamily(
    name="helium",
    architectures=("HeliumForCausalLM",),
    classifiers=("HeliumForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 100_000.0, "rms_norm_eps": 1e-8, "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
