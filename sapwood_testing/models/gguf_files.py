"""Writes GGUF files of transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
}  # fmt: skip
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_LLAMA_NORM = {"post_attention_layernorm": "ffn_norm"}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# What is not as Llama's.
_NORMS = {"gemma2": _GEMMA_NORMS, "gemma3": _GEMMA_NORMS, "olmo2": _POST_NORMS}
_INTERLEAVED = ("llama", "granite", "smollm3")


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    rope_divisors: np.ndarray | None = None,
    names: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """A model as llama.cpp's converter writes it: names, row order and norms.

    Args:
        path: The file.
        model: transformers' model.
        architecture: What the file says it is.
        rope_divisors: The values of ``rope_freqs.weight``.
        names: Other names of tensors, by those in the model.
        kinds: The types of matrices by their names in the file (``attn_q``); float32 unless given.
    """
    config = model.config
    known = _NAMES | _FUSED | dict(names or _NORMS.get(architecture, _LLAMA_NORM))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    parameters = config.rope_parameters
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        parameters = parameters["full_attention"]
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        rotary = model.model.rotary_emb
        writer.add_rope_dimension_count(2 * len(rotary.inv_freq))
        if parameters["rope_type"] == "longrope":
            writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(rotary.attention_scaling)
            for length in ("long", "short"):
                divisors = np.array(parameters[f"{length}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", divisors)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_rope_freq_base(parameters["rope_theta"])
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, np.float32))
    elif parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    elif parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    tokens[50] = "<|im_end|>"
    tokens[51] = "<|eot_id|>"
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[50] = gguf.TokenType.CONTROL
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_eos_token_id(2)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, kind = name.rsplit(".", 1)
        block = None
        if stem.startswith("model.layers."):
            block, stem = stem.removeprefix("model.layers.").split(".", 1)
        values = tensor.float()
        if architecture.startswith("gemma") and "norm" in stem:
            values = values + 1
        if architecture in _INTERLEAVED and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            values = values.reshape(heads, 2, config.head_dim // 2, *values.shape[1:]).transpose(1, 2)
            values = values.reshape(tensor.shape)
        prefix = f"blk.{block}." if block is not None else ""
        array, stored = values.contiguous().numpy(), (kinds or {}).get(known[stem])
        if stored is not None and values.dim() > 1:
            raw = gguf.GGMLQuantizationType[stored]
            writer.add_tensor(f"{prefix}{known[stem]}.{kind}", gguf.quantize(array, raw), raw_dtype=raw)
        else:
            writer.add_tensor(f"{prefix}{known[stem]}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
