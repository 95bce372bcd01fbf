"""Qwen2 and Qwen3, dense: Llama's layers, with biases on queries, keys and values (2) or norms on their heads (3)."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.gguf_values import GgufValues
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.llama import LlamaDecoderLayer

_DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "max_window_layers": 28}


def _windows(found: HfValues) -> tuple[int | None, ...]:
    values = found.values
    if values.get("sliding_window") is None or not values.get("use_sliding_window", False):
        return (None,) * found.layers
    first = int(values["max_window_layers"])
    usual = ["sliding_attention" if index >= first else "full_attention" for index in range(found.layers)]
    return found.windows(values.get("layer_types") or usual)


def _adapt_2(config: ModelConfig, found: HfValues) -> ModelConfig:
    return replace(config, windows=_windows(found), qkv_bias=True)


def _adapt_2_gguf(config: ModelConfig, _: GgufValues) -> ModelConfig:
    return replace(config, qkv_bias=True)


def _adapt_3(config: ModelConfig, found: HfValues) -> ModelConfig:
    return replace(config, windows=_windows(found), qk_norm=True)


def _adapt_3_gguf(config: ModelConfig, _: GgufValues) -> ModelConfig:
    return replace(config, qk_norm=True)


QWEN2 = ModelFamily(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults=_DEFAULTS,
    adapt=_adapt_2,
    adapt_gguf=_adapt_2_gguf,
)
QWEN3 = ModelFamily(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "head_dim": 128},
    adapt=_adapt_3,
    adapt_gguf=_adapt_3_gguf,
)
