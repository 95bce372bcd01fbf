"""Llama 4, text only. Most layers turn neighbours in a head, norm the heads without weights and see a chunk; others see all.

A chunk is where attention begins anew. Only the first is served: in it every layer sees all tokens, and queries of layers that
know no position are not scaled yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.fused import FusedRows
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    config, values = found.interleaved().llama(), found.values
    if int(values["num_experts_per_tok"]) != 1:  # inputs are scaled, once for each expert
        raise ValueError("num_experts_per_tok other than 1 is not supported")
    every, step = int(values["no_rope_layer_interval"]), int(values["interleave_moe_layer_step"])
    turned = values.get("no_rope_layers") or [(index + 1) % every for index in range(found.layers)]
    if len(turned) != found.layers:
        raise ValueError(f"no_rope_layers has {len(turned)} entries for {found.layers} layers")
    mixed = values.get("moe_layers")
    if mixed is None:
        mixed = range(step - 1, found.layers, step)
    sparse = SparseConfig(
        Routing(int(values["num_local_experts"]), 1, "sigmoid"),
        config.intermediate_size,
        dense_layers=frozenset(range(found.layers)) - frozenset(mixed),
        shared=SharedExpert("shared_expert", config.intermediate_size),
        router="router",
        scales_inputs=True,
        block="feed_forward",
        stacked=True,
    )
    return replace(
        config,
        intermediate_size=int(values["intermediate_size_mlp"]),
        max_position=int(min(config.max_position, _first_chunk(values))),
        ropes=tuple(rope if turns else None for rope, turns in zip(config.ropes, turned, strict=True)),
        qk_norm=bool(values["use_qk_norm"]),
        qk_norm_kind="unit",
        sparse=sparse,
    )


def _first_chunk(values: Mapping[str, Any]) -> float:
    """Up to how many tokens nothing has begun anew, and no query is scaled."""
    chunk, scaled = values.get("attention_chunk_size"), values.get("attn_temperature_tuning")
    ends = [int(chunk)] if chunk else []
    if scaled:
        ends.append(int(values["floor_scale"]) - 1)
    return min(ends, default=math.inf)


def _fused(config: ModelConfig) -> FusedRows:
    """An expert's gate and up lie side by side."""
    assert config.sparse is not None
    inner = config.sparse.intermediate_size
    parts = {"feed_forward.experts.gate_proj": inner, "feed_forward.experts.up_proj": inner}
    return {"feed_forward.experts.gate_up_proj": parts}


LLAMA4 = ModelFamily(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "num_local_experts": 16, "intermediate_size_mlp": 16384,
        "use_qk_norm": True, "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192,
    },
    from_hf=_from_hf,
    from_gguf=None,
    prefixes={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    fused=_fused,
    skipped=("vision_model.", "multi_modal_projector."),
)  # fmt: skip
