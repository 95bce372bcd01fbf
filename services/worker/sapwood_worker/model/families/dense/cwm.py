"""Meta's Code World Model: Llama 3's layers, three of four with a window."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues

_ROPE = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Of files that have neither ``rope_parameters`` nor ``rope_scaling``."""


def _from_hf(found: HfValues) -> ModelConfig:
    values, config = found.values, found.llama()
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        config = replace(config, ropes=(found.rope(_ROPE, float(values["rope_theta"])),) * found.layers)
    kinds = values.get("layer_types") or [
        "sliding_attention" if index % 4 else "full_attention" for index in range(found.layers)
    ]
    if found.given.get("sliding_window", values["sliding_window"]) is None:
        return config
    return replace(config, windows=found.windows(kinds))


CWM = ModelFamily(
    name="cwm",
    architectures=("CwmForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "head_dim": 128,
        "sliding_window": 8192, "max_position_embeddings": 131_072,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
