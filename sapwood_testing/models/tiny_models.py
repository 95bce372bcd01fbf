"""Tiny random models of every family, and transformers' own copy of each as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sapwood_testing.models.dense_models import DENSE
from sapwood_testing.models.sparse_models import SPARSE
from sapwood_testing.models.state_models import STATE

VOCAB = 97
_NORMS_OF_ALL_GROUPS = {"MambaRMSNormGated", "BambaRMSNormGated", "GraniteMoeHybridRMSNormGated"}
"""The norms behind Mamba 2 that have no groups in some versions of transformers."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
# Name -> (class of transformers' configuration, what differs from the common values).
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-biased-tied": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 3}),
    "qwen3-window": ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": 13,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 8.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3-one-kv-head": ("Gemma3TextConfig", {"num_key_value_heads": 1, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 19}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 5,
        },
    ),
    "qwen3-moe-plain": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0, 3]},
    ),
}
_LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 8.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
_LATENT = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
    "q_lora_rank": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
TINY |= {
    "deepseek-v2": (
        "DeepseekV2Config",
        {**_LATENT, "topk_method": "group_limited_greedy", "rope_parameters": {**_LATENT_YARN, "mscale": 1.2}},
    ),
    "deepseek-v3": ("DeepseekV3Config", _LATENT),
    "glm4-moe-lite": (
        "Glm4MoeLiteConfig",
        {**_LATENT, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "n_shared_experts": 1},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "swiglu_limit": 1.5,
            "rope_parameters": {**_LATENT_YARN, "truncate": False},
        },
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # A family that is not here.
    "another": ("HeliumConfig", {"hidden_size": 96}),
    # Wide enough for float8 by blocks.
    "wide": (
        "LlamaConfig",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "head_dim": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
        },
    ),
}


@dataclass
class Tiny:
    """A tiny random model on disk and transformers' own copy of it."""

    path: Path
    oracle: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits after every token, float32 [T, vocab]."""
        with torch.inference_mode():
            result: torch.Tensor = self.oracle(torch.tensor([tokens])).logits[0]
        return result


def make_tiny(name: str, folder: Path, **others: Any) -> Tiny:
    """A model by its name, saved in a folder as transformers saves it; settings may differ from those in ``TINY``."""
    import transformers

    config_class, changes = TINY.get(name) or DENSE.get(name) or SPARSE.get(name) or STATE.get(name) or OTHERS[name]
    made, settings = getattr(transformers, config_class), {**COMMON, **changes, **others}
    settings = {name: value for name, value in settings.items() if value is not ...}  # which leaves a common one out
    if "swiglu_limit" in settings and not hasattr(made, "swiglu_limit"):
        settings["swiglu_limit"] = 7.0  # older versions of transformers heed no other
    config = made(**settings)
    config._attn_implementation = "eager"
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval().float()
    _norm_by_group(model)
    _randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    return Tiny(folder, model)


def _norm_by_group(model: Any) -> None:
    """Norms the groups of Mamba 2's heads each by itself: some versions of transformers (5.17) norm all together, which no
    checkpoint was trained with."""
    groups: int = getattr(model.config, "mamba_n_groups", None) or getattr(model.config, "n_groups", None) or 1

    def forward(norm: Any, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = hidden.float() * torch.nn.functional.silu(gate.float())
        parts = gated.view(*gated.shape[:-1], groups, -1)
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        normed: torch.Tensor = norm.weight * parts.flatten(-2)
        return normed

    for module in model.modules():
        together = type(module).__name__ in _NORMS_OF_ALL_GROUPS and not hasattr(module, "group_size")
        if together:
            module.forward = partial(forward, module)


def _randomise(model: Any) -> None:
    """Weights large enough that every part of the model matters, norms included."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.3 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            noise = torch.randn(weight.shape, generator=generator) * spread
            ones = weight.dim() == 1 and "norm" in name and not _is_gemma(model)
            weight.copy_(noise + 1.0 if ones else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)


def _is_gemma(model: Any) -> bool:
    """Whether the model stores w of 1 + w in its norms."""
    return "gemma" in model.config.model_type
