"""Tiny configurations of families with states, as transformers names their settings."""

from __future__ import annotations

from typing import Any

_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip

STATE: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2Config",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv", "conv"],
         "block_multiple_of": 16, "conv_bias": True},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv", "conv"],
         "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {**_MAMBA, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 40, "intermediate_size": 24,
         "num_attention_heads": 3, "num_key_value_heads": 1, "layer_types": ["mamba", "attention", "mamba", "mamba"],
         "attention_multiplier": 0.2, "residual_multiplier": 0.4},
    ),
    "minimax": (
        "MiniMaxConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "full_attn_alpha_factor": 1.2,
         "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "block_size": 32,
         "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 0.7, "linear_attn_beta_factor": 1.1,
         "mlp_alpha_factor": 1.3, "mlp_beta_factor": 0.9},
    ),
    "jamba": (
        "JambaConfig",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "num_experts": 6, "num_experts_per_tok": 2, "mamba_d_state": 6,
         "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_proj_bias": True},
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 6, "head_dim": 16, "state_size": 10, "n_groups": 2, "use_bias": True, "num_attention_heads": None,
         "num_key_value_heads": None, "intermediate_size": None},
    ),
    "bamba": (
        "BambaConfig", {**_MAMBA, "attn_layer_indices": [1], "num_attention_heads": 3, "num_key_value_heads": 1,
                        "mamba_proj_bias": True, "time_step_limit": (0.1, 0.6)},
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybridConfig",
        {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 40, "position_embedding_type": "rope",
         "num_attention_heads": 3, "num_key_value_heads": 1, "layer_types": ["mamba", "attention", "mamba", "mamba"],
         "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "falcon-h1": (
        "FalconH1Config",
        {**_MAMBA, "mamba_d_ssm": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "key_multiplier": 0.6,
         "lm_head_multiplier": 0.7, "embedding_multiplier": 1.5, "mlp_multipliers": [0.8, 1.4],
         "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.2, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6,
         "ssm_multipliers": [0.5, 1.1, 0.9, 1.2, 0.8]},
    ),
    "falcon-h1-norm": (
        "FalconH1Config",
        {**_MAMBA, "mamba_d_ssm": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "projectors_bias": True, "mamba_proj_bias": True},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 10, "num_hidden_layers": None,
         "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"], "mamba_hidden_act": "silu", "use_bias": True},
    ),
}  # fmt: skip
"""Name -> the class of transformers' configuration, and what differs from what all tiny models have."""
