"""StableLM: Llama's layers with LayerNorms and a quarter of each head turned."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.known_keys import Same
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    for name in ("qk_layernorm", "use_parallel_residual"):
        if values.get(name):
            raise ValueError(f"{name} is not supported")
    return replace(
        found.llama(),
        norm="layer",
        norm_bias=True,
        rms_norm_eps=float(values["layer_norm_eps"]),
        qkv_bias=bool(values.get("use_qkv_bias", False)),
    )


STABLELM = ModelFamily(
    name="stablelm",
    unread={
        "rope_pct": Same("partial_rotary_factor", 0.25), "rotary_scaling_factor": (1.0,),
        "norm_eps": Same("layer_norm_eps", 1e-5),
    },
    architectures=("StableLmForCausalLM",),
    classifiers=("StableLmForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
        "max_position_embeddings": 4096,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
