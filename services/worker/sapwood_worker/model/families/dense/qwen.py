"""Qwen2 and Qwen3, dense: Llama's layers, with biases on queries, keys and values (2) or norms on their heads (3)."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, gguf_llama

_DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "max_window_layers": 28}


def _windows(found: HfValues) -> tuple[int | None, ...]:
    values = found.values
    if values.get("sliding_window") is None or not values.get("use_sliding_window", False):
        values.idle("layer_types")
        return (None,) * found.layers
    first = int(values["max_window_layers"])
    usual = ["sliding_attention" if index >= first else "full_attention" for index in range(found.layers)]
    return found.windows(values.get("layer_types") or usual)


QWEN2 = ModelFamily(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    classifiers=("Qwen2ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults=_DEFAULTS,
    from_hf=lambda found: replace(found.llama(), windows=_windows(found), qkv_bias=True),
    from_gguf=lambda values: replace(values.llama(), qkv_bias=True),
    to_gguf=gguf_llama,
)
QWEN3 = ModelFamily(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    classifiers=("Qwen3ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "head_dim": 128},
    from_hf=lambda found: replace(found.llama(), windows=_windows(found), qk_norm=True),
    from_gguf=lambda values: replace(values.llama(), qk_norm=True),
    to_gguf=gguf_llama,
)
