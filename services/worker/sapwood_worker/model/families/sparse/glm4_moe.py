"""GLM 4.5 and later, with experts: heads turned in half, first layers without experts, corrected sigmoids, a shared expert.

GLM 4.7 Flash has the same experts and DeepSeek's latent attention; GLM 4.5V's queries, keys and values have biases.
"""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.sparse.corrected import corrected_experts, corrected_gguf_experts
from sapwood_worker.model.families.values import LATENT_DEFAULTS, GgufValues, HfValues, read_latent
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    return replace(
        found.llama(),
        qk_norm=bool(values["use_qk_norm"]),
        output_bias=False,
        draft_layers=int(values.get("num_nextn_predict_layers", 0)),
        sparse=_sparse(found),
    )


def _from_gguf(values: GgufValues) -> ModelConfig:
    return replace(
        values.llama(partly_rotated=True),
        qk_norm="blk.0.attn_q_norm.weight" in values.file.tensors,
        sparse=corrected_gguf_experts(values),
    )


def _lite(found: HfValues) -> ModelConfig:
    return replace(read_latent(found), sparse=_sparse(found))


def _sparse(found: HfValues) -> SparseConfig:
    return corrected_experts(found, "n_routed_experts", "n_shared_experts")


_AS_ALL: dict[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

GLM4_MOE = ModelFamily(
    name="glm4_moe",
    unread=_AS_ALL,
    architectures=("Glm4MoeForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "use_qk_norm": False,
    },
    from_hf=_from_hf,
    from_gguf=_from_gguf,
    gguf_name="glm4moe",
    gguf_names={"post_attention_norm": "post_attention_layernorm"},
)  # fmt: skip
GLM4_MOE_LITE = ModelFamily(
    name="glm4_moe_lite",
    unread={**_AS_ALL, "head_dim": ()},
    architectures=("Glm4MoeLiteForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **LATENT_DEFAULTS,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    from_hf=_lite,
    from_gguf=None,
)  # fmt: skip
GLM4V_MOE = replace(
    GLM4_MOE,
    name="glm4v_moe_text",
    architectures=("Glm4vMoeTextModel",),
    defaults={**GLM4_MOE.defaults, "attention_bias": True},
    from_gguf=None,
)
