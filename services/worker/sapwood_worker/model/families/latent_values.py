"""What ``config.json`` of a model with latent attention (MLA) says of it, by DeepSeek's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.layers.latent_attention import LatentConfig
from sapwood_worker.model.layers.rope_scaling import yarn_magnitude

LATENT_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_interleave": True,
}  # fmt: skip
"""DeepSeek's defaults."""


def read_latent(found: HfValues) -> ModelConfig:
    """The configuration of a Llama whose attention is latent.

    Raises:
        KeyError: A setting is missing.
        ValueError: One is not supported.
    """
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
    rotary = replace(found, values={**values, "head_dim": latent.qk_rope_head_dim})
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return replace(
        rotary.llama(),
        num_kv_heads=1,
        attention_scale=latent.query_dim**-0.5 * _temper(rope) ** 2,
        latent=latent,
        draft_layers=int(values.get("num_nextn_predict_layers", 0)),
    )


def _temper(rope: Mapping[str, Any]) -> float:
    """What yarn's long contexts multiply queries and keys with."""
    factor, share = float(rope.get("factor", 1.0)), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or factor <= 1.0 or not share:
        return 1.0
    return yarn_magnitude(factor, float(share))
