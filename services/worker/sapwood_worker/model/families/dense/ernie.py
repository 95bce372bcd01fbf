"""ERNIE 4.5, dense: Llama's layers, neighbours of a head turned together."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues


def _from_hf(found: HfValues) -> ModelConfig:
    bias = bool(found.values.get("use_bias", False))
    return replace(found.interleaved().llama(), qkv_bias=bias, output_bias=bias, mlp_bias=bias)


ERNIE4_5 = ModelFamily(
    name="ernie4_5",
    unread={"compression_ratio": (1,), "use_rmsnorm": (True,), "weight_share_add_bias": ()},
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),  # the second in the first files that were published
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": True, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "head_dim": 128},
    from_hf=_from_hf,
    from_gguf=None,
)
