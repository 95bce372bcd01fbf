"""DeepSeek V2 and V3 with what has their layers: R1, Kimi K2, Moonlight. Llama's order of norms around latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.layers.latent_attention import LatentConfig
from sapwood_worker.model.layers.rope_scaling import yarn_magnitude
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig


def _from_hf(found: HfValues, routing: Routing) -> ModelConfig:
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
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return replace(
        found.llama(),
        head_dim=latent.qk_rope_head_dim,
        num_kv_heads=1,
        attention_scale=latent.query_dim**-0.5 * _temper(rope) ** 2,
        latent=latent,
        sparse=_sparse(found, routing),
        draft_layers=int(values.get("num_nextn_predict_layers", 0)),
    )


def _sparse(found: HfValues, routing: Routing) -> SparseConfig | None:
    values = found.values
    first, every = int(values["first_k_dense_replace"]), int(values.get("moe_layer_freq", 1))
    dense = frozenset(index for index in range(found.layers) if index < first or index % every)
    if len(dense) == found.layers:
        return None
    width, shared = int(values["moe_intermediate_size"]), int(values.get("n_shared_experts", 0))
    return SparseConfig(
        routing,
        width,
        dense_layers=dense,
        shared=SharedExpert("shared_experts", shared * width) if shared else None,
        correction=routing.scores == "sigmoid",
    )


def _routing_v2(found: HfValues) -> Routing:
    values, method = found.values, found.values["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {method!r} is not supported (greedy and group_limited_greedy are)")
    _expect(found, "scoring_func", "softmax")
    _expect(found, "norm_topk_prob", False)
    grouped = method == "group_limited_greedy"
    return Routing(
        int(values["n_routed_experts"]),
        int(values["num_experts_per_tok"]),
        scale=float(values["routed_scaling_factor"]),
        groups=int(values["n_group"]) if grouped else 1,
        chosen_groups=int(values["topk_group"]) if grouped else 1,
    )


def _routing_v3(found: HfValues) -> Routing:
    values = found.values
    _expect(found, "topk_method", "noaux_tc")
    _expect(found, "scoring_func", "sigmoid")
    return Routing(
        int(values["n_routed_experts"]),
        int(values["num_experts_per_tok"]),
        scores="sigmoid",
        renormalise=bool(values["norm_topk_prob"]),
        scale=float(values["routed_scaling_factor"]),
        groups=int(values["n_group"]),
        chosen_groups=int(values["topk_group"]),
        group_score="two_best",
    )


def _expect(found: HfValues, key: str, only: object) -> None:
    """Raises ValueError if a setting is there and another than the only one that is supported."""
    value = found.values.get(key, only)
    if value != only:
        raise ValueError(f"{key} {value!r} is not supported ({only!r} is)")


def _temper(rope: Mapping[str, Any]) -> float:
    """What yarn's long contexts multiply queries and keys with."""
    factor, share = float(rope.get("factor", 1.0)), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or factor <= 1.0 or not share:
        return 1.0
    return yarn_magnitude(factor, float(share))


_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_interleave": True,
}  # fmt: skip

DEEPSEEK_V2 = ModelFamily(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0, "topk_method": "greedy",
    },
    from_hf=lambda found: _from_hf(found, _routing_v2(found)),
    from_gguf=None,
)  # fmt: skip
DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    },
    from_hf=lambda found: _from_hf(found, _routing_v3(found)),
    from_gguf=None,
)  # fmt: skip
