"""Projections that some families' checkpoints store as one tensor, their rows one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from sapwood_worker.model.config import ModelConfig

FusedRows = Mapping[str, Mapping[str, int]]
"""The name of a stored projection within a layer -> the names of its parts, with each one's rows, in order."""


def fused_qkv(config: ModelConfig) -> FusedRows:
    """``qkv_proj`` holds the queries, keys and values."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {"self_attn.qkv_proj": {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}}


def fused_gate_up(config: ModelConfig) -> FusedRows:
    """``gate_up_proj`` holds the MLP's gate and up projections."""
    inner = config.intermediate_size
    return {"mlp.gate_up_proj": {"mlp.gate_proj": inner, "mlp.up_proj": inner}}
