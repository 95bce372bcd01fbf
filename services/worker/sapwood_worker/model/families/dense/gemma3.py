"""Gemma 3, text only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import SandwichDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.values import GgufValues, HfValues, gguf_llama, gguf_rope
from sapwood_worker.model.layers.rotary import RopeConfig

# Values that GGUF files do not state.
_LOCAL_THETA, _PATTERN, _27B_LAYERS = 10_000.0, 6, 62
_WINDOW, _WINDOW_PATTERN, _WINDOW_THETA = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
)


def _from_hf(found: HfValues) -> ModelConfig:
    config, values = found.llama(), found.values
    kinds = values.get("layer_types") or _kinds(config.num_layers, int(values["sliding_window_pattern"]))
    # Old files: rope_scaling is for the full layers only. New files: one set of parameters for each kind of layer.
    ropes = values.get("rope_parameters") or {}
    full = ropes.get("full_attention") or values.get("rope_scaling")
    return replace(
        _common(config),
        ropes=_ropes(
            windows := found.windows(kinds),
            found.rope(full, float(values["rope_theta"])),
            found.rope(ropes.get("sliding_attention"), float(values["rope_local_base_freq"])),
        ),
        windows=windows,
        activation=found.activation("hidden_activation"),
        attention_scale=float(values["query_pre_attn_scalar"]) ** -0.5,
        # transformers' Gemma 3 reads attn_logit_softcapping but never applies it; published files have none.
        attention_softcap=None,
        final_softcap=found.given.get("final_logit_softcapping"),
    )


def _from_gguf(values: GgufValues) -> ModelConfig:
    config = values.llama()
    values.get("final_logit_softcapping", 0.0)
    window = values.count(_WINDOW)
    kinds = _kinds(config.num_layers, values.count(_WINDOW_PATTERN, _PATTERN))
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    scale = config.attention_scale
    if config.num_layers == _27B_LAYERS:
        scale = (config.hidden_size // config.num_heads) ** -0.5
    return replace(
        _common(config),
        ropes=_ropes(windows, values.rope(1_000_000.0), RopeConfig(float(values.get(_WINDOW_THETA, _LOCAL_THETA)))),
        windows=windows,
        activation="gelu_tanh",
        attention_scale=scale,
    )


def _to_gguf(config: ModelConfig) -> dict[str, Any]:
    settings = gguf_llama(config) | {_WINDOW: config.max_position}
    for window, rope in zip(config.windows, config.ropes, strict=True):
        assert rope is not None
        if window is None:
            settings |= gguf_rope(rope, config.head_dim)
        else:
            settings |= {_WINDOW: window, _WINDOW_THETA: float(rope.theta)}
    full = [index + 1 for index, window in enumerate(config.windows) if window is None]
    return settings | {_WINDOW_PATTERN: full[0] if full else _PATTERN}


def _ropes(windows: Sequence[int | None], full: RopeConfig, local: RopeConfig) -> tuple[RopeConfig, ...]:
    return tuple(full if window is None else local for window in windows)


def _common(config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True, embedding_scale=math.sqrt(config.hidden_size), norm_offset=1.0)


def _kinds(layers: int, pattern: int) -> list[str]:
    return ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(layers)]


GEMMA3 = ModelFamily(
    name="gemma3",
    unread={"hidden_act": ("gelu_pytorch_tanh",), "sliding_window_pattern": (), "attn_logit_softcapping": ()},
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    classifiers=("Gemma3TextForSequenceClassification",),
    layer=SandwichDecoderLayer,
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6, "tie_word_embeddings": True, "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    from_hf=_from_hf,
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    # Multimodal checkpoints keep the language model under one of these prefixes.
    prefixes={
        "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
    },
    skipped=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)  # fmt: skip
