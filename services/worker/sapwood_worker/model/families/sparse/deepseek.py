"""DeepSeek V2 and V3 with what has their layers: R1, Kimi K2, Moonlight. Llama's order of norms around latent attention."""

from __future__ import annotations

from dataclasses import replace

from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.sparse.corrected import corrected_routing
from sapwood_worker.model.families.values import (
    LATENT_DEFAULTS,
    LATENT_GGUF_NAMES,
    GgufValues,
    HfValues,
    read_gguf_latent,
    read_latent,
    read_routing,
)
from sapwood_worker.model.layers.sparse.sparse_mlp import CORRECTION, SharedExpert, SparseConfig


def _from_hf(found: HfValues, routing: Routing) -> ModelConfig:
    return replace(read_latent(found), sparse=_sparse(found, routing))


def _sparse(found: HfValues, routing: Routing) -> SparseConfig | None:
    values = found.values
    first, every = int(values["first_k_dense_replace"]), int(values.get("moe_layer_freq", 1))
    dense = frozenset(index for index in range(found.layers) if index < first or index % every)
    if len(dense) == found.layers:
        values.idle("moe_intermediate_size", "n_shared_experts")
        return None
    width, shared = int(values["moe_intermediate_size"]), int(values.get("n_shared_experts", 0))
    return SparseConfig(
        routing,
        width,
        dense_layers=dense,
        shared=SharedExpert("shared_experts", shared * width) if shared else None,
        correction=CORRECTION if routing.scores == "sigmoid" else "",
    )


_UNSAID_GROUPS = {256: (8, 4), 160: (8, 3)}
"""Groups of V3's and of V2's experts, and how many a token goes to, by the number of experts: older GGUF files do not say."""


def _from_gguf(values: GgufValues) -> ModelConfig:
    sparse = values.experts(renormalise=False)
    routing = sparse.routing
    corrected = routing.scores == "sigmoid"
    width, shared = sparse.intermediate_size, values.count("expert_shared_count", 0, least=0)
    if not values.get("expert_group_count", 0):
        groups, chosen = _UNSAID_GROUPS.get(routing.experts, (1, 1))
        routing = replace(routing, groups=groups, chosen_groups=chosen)
    sparse = replace(
        sparse,
        routing=routing,
        shared=SharedExpert("shared_experts", shared * width) if shared else None,
        correction=CORRECTION if corrected else "",
    )
    return replace(read_gguf_latent(values), sparse=sparse)


def _routing_v2(found: HfValues) -> Routing:
    values, method = found.values, found.values["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {method!r} is not supported (greedy and group_limited_greedy are)")
    _expect(found, "scoring_func", "softmax")
    _expect(found, "norm_topk_prob", False)
    grouped = method == "group_limited_greedy"
    if not grouped:
        values.idle("n_group", "topk_group")
    return read_routing(
        values,
        "n_routed_experts",
        "num_experts_per_tok",
        ("n_group", "topk_group") if grouped else None,
        scale=float(values["routed_scaling_factor"]),
    )


def _routing_v3(found: HfValues) -> Routing:
    _expect(found, "topk_method", "noaux_tc")
    _expect(found, "scoring_func", "sigmoid")
    return corrected_routing(found, "n_routed_experts")


def _expect(found: HfValues, key: str, only: object) -> None:
    """Raises ValueError if a setting is there and another than the only one that is supported."""
    value = found.values.get(key, only)
    if value != only:
        raise ValueError(f"{key} {value!r} is not supported ({only!r} is)")


DEEPSEEK_V2 = ModelFamily(
    name="deepseek_v2",
    unread={"head_dim": ()},
    architectures=("DeepseekV2ForCausalLM",),
    classifiers=("DeepseekV2ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        **LATENT_DEFAULTS,
        "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0, "topk_method": "greedy",
    },
    from_hf=lambda found: _from_hf(found, _routing_v2(found)),
    from_gguf=_from_gguf,
    gguf_name="deepseek2",  # of V3, R1, Kimi K2 and GLM 4.7 Flash, too
    gguf_names=LATENT_GGUF_NAMES,
)  # fmt: skip
DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    unread={"head_dim": ()},
    architectures=("DeepseekV3ForCausalLM",),
    classifiers=("DeepseekV3ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        **LATENT_DEFAULTS,
        "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    },
    from_hf=lambda found: _from_hf(found, _routing_v3(found)),
    from_gguf=None,
)  # fmt: skip
