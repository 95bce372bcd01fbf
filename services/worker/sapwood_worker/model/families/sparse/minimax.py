"""MiniMax M2: Mixtral's experts by corrected sigmoids, heads turned in part, queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    for key, only in (("scoring_func", "sigmoid"), ("use_qk_norm", True), ("qk_norm_type", "per_layer")):
        if values.get(key, only) != only:
            raise ValueError(f"{key} {values[key]!r} is not supported ({only!r} is)")
    if "rotary_dim" in values:  # published files; newer ones have the part of a head
        part = int(values["rotary_dim"]) / found.head_dim
        found = replace(found, values=values.but({"partial_rotary_factor": values.get("partial_rotary_factor", part)}))
    config = found.llama()
    routing = read_routing(values, "num_local_experts", "num_experts_per_tok", scores="sigmoid", renormalise=True)
    sparse = SparseConfig(
        routing,
        config.intermediate_size,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        correction="e_score_correction_bias",
    )
    return replace(config, qk_norm=True, qk_norm_kind="width", sparse=sparse)


_AS_ALL: dict[str, tuple[object, ...]] = {
    "attn_type_list": (1,), "layernorm_full_attention_beta": (1.0,), "layernorm_linear_attention_beta": (1.0,),
    "layernorm_mlp_beta": (1.0,), "mlp_intermediate_size": (), "shared_intermediate_size": (0,), "shared_moe_mode": (),
    "use_routing_bias": (True,), "rotary_dim": (),
}  # fmt: skip

MINIMAX_M2 = ModelFamily(
    name="minimax_m2",
    unread=_AS_ALL,
    architectures=("MiniMaxM2ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 5_000_000.0, "head_dim": 128, "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
