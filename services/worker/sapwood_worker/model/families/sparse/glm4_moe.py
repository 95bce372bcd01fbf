"""GLM 4.5 and later, with experts: heads turned in half, first layers without experts, corrected sigmoids, a shared expert."""

from __future__ import annotations

from dataclasses import replace

from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    width = int(values["moe_intermediate_size"])
    routing = Routing(
        int(values["n_routed_experts"]),
        int(values["num_experts_per_tok"]),
        scores="sigmoid",
        renormalise=bool(values["norm_topk_prob"]),
        scale=float(values["routed_scaling_factor"]),
        groups=int(values["n_group"]),
        chosen_groups=int(values["topk_group"]),
        group_score="two_best",
    )
    return replace(
        found.llama(),
        qk_norm=bool(values["use_qk_norm"]),
        output_bias=False,
        draft_layers=int(values.get("num_nextn_predict_layers", 0)),
        sparse=SparseConfig(
            routing,
            width,
            dense_layers=frozenset(range(int(values["first_k_dense_replace"]))),
            shared=SharedExpert("shared_experts", width * int(values["n_shared_experts"])),
            correction=True,
        ),
    )


GLM4_MOE = ModelFamily(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "use_qk_norm": False,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
