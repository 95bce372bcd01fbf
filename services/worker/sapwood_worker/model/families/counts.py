"""Settings that count something, of ``config.json`` or a GGUF file: each has to be a whole number, and not too low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZES = (
    "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_EXPERTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
_OF_EXPERTS = (
    "num_experts_per_tok", "moe_k", "moe_intermediate_size", "n_group", "topk_group", "moe_layer_freq", "decoder_sparse_step",
    "moe_layer_interval", "interleave_moe_layer_step", "no_rope_layer_interval",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "block_count", "num_nextn_predict_layers")
MOST_LAYERS, MOST = 4096, 2**31 - 1
"""The most layers, and the most of anything else: more are no model, and would take the machine's memory."""
_SHARED = "shared_expert_intermediate_size"
"""Of families that have a default of it. Files of Qwen3-Coder, whose family does not read it, say 0: there is no such expert."""
_MAY_BE_NONE = (
    "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers",
)  # fmt: skip
"""The number of these may be 0."""


def check_counts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ValueError if a setting of ``config.json`` that is there cannot be a number of something; names it.

    Args:
        values: The settings.
        defaults: The family's, which tell whether it has experts: files of others may say that there are 0.
    """
    least = dict.fromkeys(_SIZES, 1)
    if not defaults.keys().isdisjoint(_EXPERTS):
        least |= dict.fromkeys((*_EXPERTS, *_OF_EXPERTS), 1) | dict.fromkeys(_MAY_BE_NONE, 0)
        if _SHARED in defaults:
            least[_SHARED] = 1
    for name in values.keys() & least.keys():
        check_count(name, values[name], least[name])


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ValueError if a setting's value is no whole number from ``least`` on, or more than any model has; names it."""
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
    if not whole or value < least:
        raise ValueError(f"{name} is {value!r:.60}; it can be a whole number from {least} on")
    most = MOST_LAYERS if name.endswith(_LAYERS) else MOST
    if value > most:
        raise ValueError(f"{name} is {value!r:.60}; it can be {most} at most")
