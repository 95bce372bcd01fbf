"""DeepSeek V2 and V3 with what has their layers: R1, Kimi K2, Moonlight. Llama's order of norms around latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.layers.latent_attention import LatentConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    if values.get("attention_bias"):
        raise ValueError("attention_bias is not supported with latent attention")
    latent = LatentConfig(
        kv_lora_rank=int(values["kv_lora_rank"]),
        qk_nope_head_dim=int(values["qk_nope_head_dim"]),
        qk_rope_head_dim=int(values["qk_rope_head_dim"]),
        v_head_dim=int(values["v_head_dim"]),
        # A file may well say null, which is not the default.
        q_lora_rank=found.given.get("q_lora_rank", values.get("q_lora_rank")),
        rope_interleave=bool(values["rope_interleave"]),
    )
    if int(values["first_k_dense_replace"]) < found.layers:
        raise ValueError("layers of experts are not supported: first_k_dense_replace is less than num_hidden_layers")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return replace(
        found.llama(),
        head_dim=latent.qk_rope_head_dim,
        num_kv_heads=1,
        attention_scale=latent.query_dim**-0.5 * _temper(rope) ** 2,
        latent=latent,
    )


def _temper(rope: Mapping[str, Any]) -> float:
    """What yarn's long contexts multiply queries and keys with."""
    factor, share = float(rope.get("factor", 1.0)), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or factor <= 1.0 or not share:
        return 1.0
    return 0.1 * float(share) * math.log(factor) + 1.0


_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_interleave": True,
}  # fmt: skip

DEEPSEEK_V2 = ModelFamily(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "first_k_dense_replace": 0},
    from_hf=_from_hf,
    from_gguf=None,
)
DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "first_k_dense_replace": 3},
    from_hf=_from_hf,
    from_gguf=None,
)
