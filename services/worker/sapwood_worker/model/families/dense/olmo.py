"""OLMo 1: LayerNorms without weights. OLMo 2 and 3: norms after attention and MLP, and of all query and key heads together.

Three of four layers of OLMo 3 have windows.
"""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import PostNormDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues


def _common(config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True, qk_norm_kind="width")


def _olmo(found: HfValues) -> ModelConfig:
    clip = found.values.get("clip_qkv")
    return replace(
        found.llama(),
        norm="layer",
        norm_weight=False,
        rms_norm_eps=_EPS,
        clip_qkv=None if clip is None else float(clip),
    )


_EPS = 1e-5
"""Which no file says."""


def _olmo3(found: HfValues) -> ModelConfig:
    values = found.values
    kinds = values.get("layer_types") or [
        "full_attention" if (index + 1) % 4 == 0 else "sliding_attention" for index in range(found.layers)
    ]
    # rope_scaling is for the full layers only. New files: one set of parameters for each kind of layer.
    ropes, theta = values.get("rope_parameters") or {}, float(values["rope_theta"])
    full = found.rope(ropes.get("full_attention") or values.get("rope_scaling"), theta)
    local = found.rope(ropes.get("sliding_attention"), theta)
    windows = found.windows(kinds)
    return replace(
        _common(found.llama()), windows=windows, ropes=tuple(full if window is None else local for window in windows)
    )


def _olmo2_gguf(values: GgufValues) -> ModelConfig:
    return _common(values.llama())


_DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5}

OLMO = ModelFamily(
    name="olmo",
    architectures=("OlmoForCausalLM",),
    classifiers=("OlmoForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": False, "rope_theta": 10_000.0, "max_position_embeddings": 2048},
    from_hf=_olmo,
    from_gguf=None,
)
OLMO2 = ModelFamily(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    classifiers=("Olmo2ForSequenceClassification",),
    layer=PostNormDecoderLayer,
    defaults=_DEFAULTS,
    from_hf=lambda found: _common(found.llama()),
    from_gguf=_olmo2_gguf,
    gguf_names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
)
OLMO3 = ModelFamily(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    classifiers=("Olmo3ForSequenceClassification",),
    layer=PostNormDecoderLayer,
    defaults={**_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096},
    from_hf=_olmo3,
    from_gguf=None,
)
