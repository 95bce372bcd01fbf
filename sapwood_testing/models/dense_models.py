"""Tiny configurations of the dense families, as transformers names their settings."""

from __future__ import annotations

from typing import Any

_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
_WHOLE_HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
"""For families that do not say how wide a head is: the width of the model over the number of heads, 16."""
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "q_lora_rank": 20,
}  # fmt: skip

_GPT: dict[str, Any] = {**_WHOLE_HEADS, **dict.fromkeys(("num_key_value_heads", "intermediate_size", "head_dim"), ...)}
"""For GPTs: transformers takes these names, and the file has theirs."""

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", {**_WHOLE_HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "falcon-7b": ("FalconConfig", _GPT),
    "falcon-40b": ("FalconConfig", {**_GPT, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "FalconConfig",
        {
            **_GPT, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": ("GPT2Config", _GPT),
    "gpt-bigcode": ("GPTBigCodeConfig", _GPT),
    "gpt-bigcode-all-heads": ("GPTBigCodeConfig", {**_GPT, "multi_query": False, "n_inner": 144}),
    "gpt-neo": (
        "GPTNeoConfig",
        {**_GPT, "attention_types": [[["global", "local"], 2]], "window_size": 9},
    ),
    "gpt-neox": ("GPTNeoXConfig", {**_WHOLE_HEADS, "num_key_value_heads": None}),
    "gpt-neox-in-turn": ("GPTNeoXConfig", {**_WHOLE_HEADS, "use_parallel_residual": False, "attention_bias": False}),
    "gptj": ("GPTJConfig", {**_GPT, "rotary_dim": 8}),
    "olmo": ("OlmoConfig", {**_WHOLE_HEADS, "clip_qkv": 0.7}),
    "opt": ("OPTConfig", {**_GPT, "word_embed_proj_dim": None, "ffn_dim": 160}),
    "phi-two": ("PhiConfig", _WHOLE_HEADS),
    "arcee": ("ArceeConfig", {"mlp_bias": True}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "cohere-qk-norm": ("CohereConfig", {"logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("Cohere2Config", {**_WHOLE_HEADS, "logit_scale": 0.5, "sliding_window": 9}),
    "cwm": ("CwmConfig", {"sliding_window": 9, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
    }}),
    "ernie": ("Ernie4_5Config", {"use_bias": True}),
    "exaone4": ("Exaone4Config", {"sliding_window": 9}),
    "exaone4-full": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 13, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "glm": ("GlmConfig", {}),
    "glm4": ("Glm4Config", {"attention_bias": False, "tie_word_embeddings": True}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0,
            "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "helium": ("HeliumConfig", _WHOLE_HEADS),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0}},
    ),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            **_WHOLE_HEADS, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    "jais2": ("Jais2Config", _WHOLE_HEADS),
    "minicpm3": (
        "MiniCPM3Config",
        {**_LATENT, "scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 16, "rope_parameters": {
            **_LONGROPE, "original_max_position_embeddings": 32,
        }},
    ),
    "ministral": (
        "MinistralConfig",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "mistral-no-window": ("MistralConfig", {"sliding_window": None}),
    "nemotron": ("NemotronConfig", {"attention_bias": True}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 11,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.2,
                    "original_max_position_embeddings": 64, "beta_fast": 24.0, "beta_slow": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3Config", {**_WHOLE_HEADS, "sliding_window": 21}),
    "phi3-longrope": (
        "Phi3Config",
        {
            **_WHOLE_HEADS, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
    ),
    "phi3-partly-rotated": (
        "Phi3Config",
        {**_WHOLE_HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "qwen2.5-yarn": (
        "Qwen2Config",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "seed-oss": ("SeedOssConfig", {"attention_out_bias": True}),
    "smollm3": ("SmolLM3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "stablelm": ("StableLmConfig", {**_WHOLE_HEADS, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2Config", {**_WHOLE_HEADS, "sliding_window": 19}),
    "starcoder2-without-bias": ("Starcoder2Config", {**_WHOLE_HEADS, "use_bias": False, "tie_word_embeddings": False}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {
            "sliding_window": 13, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "youtu": ("YoutuConfig", {**_LATENT, "v_head_dim": 10}),
}  # fmt: skip
"""Name -> the class of transformers' configuration, and what differs from what all tiny models have."""
