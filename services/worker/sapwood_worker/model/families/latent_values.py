"""What files of a model with latent attention (MLA) say of it: ``config.json`` by DeepSeek's names, GGUF by llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.counts import check_count
from sapwood_worker.model.families.gguf_values import GgufValues
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.layers.latent_attention import LatentConfig
from sapwood_worker.model.layers.rope_scaling import YarnScaling, yarn_magnitude

LATENT_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_interleave": True,
}  # fmt: skip
"""DeepSeek's defaults."""
LATENT_GGUF_NAMES = {
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
"""Name of a layer's tensor in GGUF files -> its name in Hugging Face's checkpoints."""
_LOG_FACTOR = 0.1
"""``yarn_log_multiplier`` of GGUF files is ``mscale_all_dim`` times this."""


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
    rotary = replace(found, values=values.but({"head_dim": latent.qk_rope_head_dim}))
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return replace(
        rotary.llama(),
        num_kv_heads=1,
        attention_scale=latent.query_dim**-0.5 * _temper(rope) ** 2,
        latent=latent,
        draft_layers=int(values.get("num_nextn_predict_layers", 0)),
    )


def read_gguf_latent(values: GgufValues) -> ModelConfig:
    """The same of a GGUF file.

    Raises:
        KeyError: A setting is missing.
        ValueError: One is not supported.
    """
    get, count = values.get, values.count
    rotated = count("rope.dimension_count")
    # Newer files say as the size of keys and values what the cache holds.
    queries = count("attention.key_length_mla", count("attention.key_length"))
    check_count(f"a key's size without {values.named('rope.dimension_count')}", queries - rotated, 1)
    latent = LatentConfig(
        kv_lora_rank=count("attention.kv_lora_rank"),
        qk_nope_head_dim=queries - rotated,
        qk_rope_head_dim=rotated,
        v_head_dim=count("attention.value_length_mla", count("attention.value_length")),
        q_lora_rank=count("attention.q_lora_rank", 0, least=0) or None,
    )
    config = values.llama(head_dim=rotated)
    [rope] = set(config.ropes)
    scale, share = latent.query_dim**-0.5, float(get("rope.scaling.yarn_log_multiplier", 0.0)) / _LOG_FACTOR
    if rope is not None and isinstance(rope.scaling, YarnScaling) and share:
        # They do not say what cosines and sines are multiplied by: in all published models it is 1.
        rope = replace(rope, scaling=replace(rope.scaling, magnitude=1.0))
        scale *= yarn_magnitude(float(get("rope.scaling.factor")), share) ** 2
    return replace(config, num_kv_heads=1, attention_scale=scale, latent=latent, ropes=(rope,) * config.num_layers)


def _temper(rope: Mapping[str, Any]) -> float:
    """What yarn's long contexts multiply queries and keys with."""
    factor, share = float(rope.get("factor", 1.0)), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or factor <= 1.0 or not share:
        return 1.0
    return yarn_magnitude(factor, float(share))
