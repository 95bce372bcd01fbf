"""Nemotron 3 and 4, Arcee's AFM and Jais 2: Llama's layers with an MLP without a gate, whose activation is the square of ReLU."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.known_keys import Same
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues
from sapwood_worker.model.layers.mlp import PlainConfig


def _arcee(found: HfValues) -> ModelConfig:
    if found.values["hidden_act"] != "relu2":
        raise ValueError(f"hidden_act: activation {found.values['hidden_act']!r} is not supported (relu2 is)")
    return replace(found.llama(gated=False), plain_mlp=PlainConfig("relu2"))


def _nemotron(found: HfValues) -> ModelConfig:
    # Its norms store w of 1 + w.
    return replace(
        _arcee(found), norm="layer", norm_bias=True, norm_offset=1.0, rms_norm_eps=float(found.values["norm_eps"])
    )


def _jais2(found: HfValues) -> ModelConfig:
    return replace(_arcee(found), norm="layer", norm_bias=True, rms_norm_eps=float(found.values["layer_norm_eps"]))


_DEFAULTS = {
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "hidden_act": "relu2", "max_position_embeddings": 4096,
}  # fmt: skip

ARCEE = ModelFamily(
    name="arcee",
    architectures=("ArceeForCausalLM",),
    classifiers=("ArceeForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "rms_norm_eps": 1e-5},
    from_hf=_arcee,
    from_gguf=None,
)
NEMOTRON = ModelFamily(
    name="nemotron",
    unread={
        "rope_percent": Same("partial_rotary_factor", 0.5),
        "rope_percentage": Same("partial_rotary_factor", 0.5),
        "kv_channels": Same("head_dim"),
    },
    architectures=("NemotronForCausalLM",),
    classifiers=("NemotronForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    from_hf=_nemotron,
    from_gguf=None,
)
JAIS2 = ModelFamily(
    name="jais2",
    architectures=("Jais2ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True,
    },
    from_hf=_jais2,
    from_gguf=None,
)  # fmt: skip
