"""Tiny configurations of families with experts, as transformers names their settings."""

from __future__ import annotations

from typing import Any

_WHOLE_HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
"""For families that do not say how wide a head is: the width of the model over the number of heads, 16."""
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3}
_GROUPED: dict[str, Any] = {
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}  # fmt: skip

SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "dots1": (
        "Dots1Config",
        {
            **_GROUPED, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "dots1-no-windows": (
        "Dots1Config",
        {**_GROUPED, "n_routed_experts": 8, "n_shared_experts": 1, "sliding_window": None},
    ),
    "ernie4-5-moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
            "num_hidden_layers": 5, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2,
        },
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        {
            **_WHOLE_HEADS, "num_local_experts": 8, "num_experts_per_tok": 3, "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {
            **_WHOLE_HEADS, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
            "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "exaone-moe": ("ExaoneMoeConfig", {**_GROUPED, "num_experts": 8, "num_shared_experts": 2, "sliding_window": 9}),
    "flex-olmo": ("FlexOlmoConfig", {**_EXPERTS, **_WHOLE_HEADS}),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"num_experts": 8, "moe_topk": 3}),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2, "num_hidden_layers": 5, "attention_chunk_size": 16, "use_qk_norm": True,
            "floor_scale": 12, "attn_scale": 0.5,
        },
    ),
    "llama4-no-norms": (
        "Llama4TextConfig",
        {
            "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 80,
            "no_rope_layers": [1, 0, 0, 1], "attention_chunk_size": 27, "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {
            "num_local_experts": 8, "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "olmoe": ("OlmoeConfig", {**_EXPERTS, **_WHOLE_HEADS, "norm_topk_prob": True}),
    "olmoe-clipped": ("OlmoeConfig", {**_EXPERTS, **_WHOLE_HEADS, "norm_topk_prob": True, "clip_qkv": 0.7}),
    "solar-open": ("SolarOpenConfig", {**_GROUPED, "n_routed_experts": 8, "attention_bias": True}),
}  # fmt: skip
