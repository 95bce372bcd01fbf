"""The language part of Llama 4. Most layers rotate neighbours in a head, norm the heads without weights and see only their
chunk of the text. The others see all of the text, without rotation, and scale their queries by the position."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.rotary import QueryGrowth
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
    chunk = values["attention_chunk_size"]
    kinds = values.get("layer_types") or ["chunked_attention" if turns else "full_attention" for turns in turned]
    if len(kinds) != found.layers or not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise ValueError(f"layer_types {kinds} for {found.layers} layers are not supported")
    grows = values["attn_temperature_tuning"]
    if not grows:
        values.idle("floor_scale", "attn_scale")
    sparse = SparseConfig(
        read_routing(values, "num_local_experts", "num_experts_per_tok", scores="sigmoid"),
        config.intermediate_size,
        dense_layers=frozenset(range(found.layers)) - frozenset(mixed),
        shared=SharedExpert("shared_expert", config.intermediate_size),
        router="router",
        scales_inputs=True,
        block="feed_forward",
        stacked="transposed",
    )
    return replace(
        config,
        intermediate_size=int(values["intermediate_size_mlp"]),
        windows=tuple(int(chunk) if chunk and kind == "chunked_attention" else None for kind in kinds),
        chunked=True,
        growth=QueryGrowth(float(values["floor_scale"]), float(values["attn_scale"])) if grows else None,
        ropes=tuple(rope if turns else None for rope, turns in zip(config.ropes, turned, strict=True)),
        qk_norm=bool(values["use_qk_norm"]),
        qk_norm_kind="unit",
        sparse=sparse,
    )


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
        "attn_scale": 0.1,
    },
    from_hf=_from_hf,
    from_gguf=None,
    prefixes={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    fused=_fused,
    skipped=("vision_model.", "multi_modal_projector."),
)  # fmt: skip
