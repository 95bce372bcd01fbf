"""Mistral and Ministral: Llama's layers, with a window over all or some of them.

Queries of Ministral 3 grow with their position.
"""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, gguf_llama
from sapwood_worker.model.layers.rotary import QueryGrowth


def _from_hf(found: HfValues) -> ModelConfig:
    kinds = found.values.get("layer_types")
    windows = found.one_window() if kinds is None else found.windows(kinds)
    return replace(found.llama(), windows=windows)


def _ministral3(found: HfValues) -> ModelConfig:
    values = found.values
    values.idle("layer_types")  # transformers has one kind of layer for it, whatever the file says
    config = replace(found.llama(), windows=found.one_window())
    rope = values["rope_parameters"]
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        raise ValueError("rope_parameters.llama_4_scaling_beta is missing")
    growth = QueryGrowth(float(rope["original_max_position_embeddings"]), float(beta), first=0.0)
    return replace(config, ropes=tuple(replace(each, growth=growth) for each in config.ropes if each is not None))


MISTRAL = ModelFamily(
    name="mistral",
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    classifiers=("MistralForSequenceClassification", "MinistralForSequenceClassification"),
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": False, "rope_theta": 10_000.0, "sliding_window": 4096},
    from_hf=_from_hf,
    from_gguf=None,  # such files call it llama, and the family of that name reads them
    to_gguf=gguf_llama,
    gguf_name="llama",
    gguf_interleaves=True,
)
MINISTRAL3 = ModelFamily(
    name="ministral3",
    architectures=("Ministral3ForCausalLM",),
    classifiers=("Ministral3ForSequenceClassification",),
    unread={"rope_parameters.max_position_embeddings": ()},
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    from_hf=_ministral3,
    from_gguf=None,
)  # fmt: skip
