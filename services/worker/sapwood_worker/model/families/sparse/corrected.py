"""Families with DeepSeek V3's experts and grouped attention: dots.llm1, K-EXAONE, Solar Open."""

from __future__ import annotations

from dataclasses import replace

from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.dense.exaone4 import EXAONE4
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import CORRECTION, SharedExpert, SparseConfig


def corrected_routing(found: HfValues, experts: str) -> Routing:
    """Sigmoid scores that are corrected where experts are chosen, in groups, by their two best.

    Args:
        found: The settings.
        experts: Which of them is the number of experts.
    """
    values = found.values
    return read_routing(
        values,
        experts,
        "num_experts_per_tok",
        ("n_group", "topk_group"),
        scores="sigmoid",
        renormalise=bool(values["norm_topk_prob"]),
        scale=float(values["routed_scaling_factor"]),
        group_score="two_best",
    )


def corrected_experts(found: HfValues, experts: str, shared: str, correction: str = CORRECTION) -> SparseConfig:
    """Experts that are chosen by :func:`corrected_routing`.

    Args:
        found: The settings.
        experts: Which of them is the number of experts.
        shared: Which is the number of shared ones.
        correction: The checkpoints' name of the scores' correction.
    """
    values = found.values
    width, count = int(values["moe_intermediate_size"]), int(values.get(shared) or 0)
    first = int(values["first_k_dense_replace"])
    kinds = values.get("mlp_layer_types") or ["dense" if at < first else "sparse" for at in range(found.layers)]
    return SparseConfig(
        corrected_routing(found, experts),
        width,
        dense_layers=frozenset(at for at, kind in enumerate(kinds) if kind == "dense"),
        shared=SharedExpert("shared_experts", width * count) if count else None,
        correction=correction,
    )


def corrected_gguf_experts(values: GgufValues) -> SparseConfig:
    """The same of a GGUF file."""
    found = values.experts(renormalise=False, sigmoid=True)
    width, count = found.intermediate_size, values.count("expert_shared_count", 0, least=0)
    return replace(
        found,
        shared=SharedExpert("shared_experts", width * count) if count else None,
        correction=CORRECTION,
    )


def _dots1(found: HfValues) -> ModelConfig:
    values = found.values
    windowed = found.given.get("sliding_window", values["sliding_window"]) is not None
    first = int(values["max_window_layers"]) if windowed else found.layers
    usual = ["sliding_attention" if index >= first else "full_attention" for index in range(found.layers)]
    kinds = values.get("layer_types") or usual
    windows = found.windows(kinds) if "sliding_attention" in kinds else (None,) * found.layers
    sparse = corrected_experts(found, "n_routed_experts", "n_shared_experts")
    return replace(found.llama(), windows=windows, qk_norm=True, sparse=sparse)


def _dots1_gguf(values: GgufValues) -> ModelConfig:
    return replace(values.llama(), qk_norm=True, sparse=corrected_gguf_experts(values))


def _exaone(found: HfValues) -> ModelConfig:
    sparse = corrected_experts(found, "num_experts", "num_shared_experts", "e_score_correction_bias")
    return replace(EXAONE4.from_hf(found), sparse=sparse)


def _solar(found: HfValues) -> ModelConfig:
    # No MLP is dense; files may leave its width out.
    width = int(found.values["moe_intermediate_size"])
    width = found.values.get("intermediate_size", width)
    found = replace(found, values=found.values.but({"intermediate_size": width, "first_k_dense_replace": 0}))
    sparse = corrected_experts(found, "n_routed_experts", "n_shared_experts")
    return replace(found.llama(), output_bias=False, sparse=sparse)


_GROUPS = {"tie_word_embeddings": False, "n_group": 1, "topk_group": 1}

_AS_ALL: dict[str, tuple[object, ...]] = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}

DOTS1 = ModelFamily(
    name="dots1",
    unread={**_AS_ALL, "use_sliding_window": (True,)},
    architectures=("Dots1ForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_GROUPS, "rope_theta": 10_000.0, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62,
    },
    from_hf=_dots1,
    from_gguf=_dots1_gguf,
)  # fmt: skip
EXAONE_MOE = ModelFamily(
    name="exaone_moe",
    unread=_AS_ALL,
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),  # transformers writes the first, K-EXAONE's files the second
    layer=LlamaDecoderLayer,
    defaults={
        **EXAONE4.defaults, **_GROUPS, "first_k_dense_replace": 1, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024, "num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    from_hf=_exaone,
    from_gguf=None,
    skipped=("mtp.",),
)  # fmt: skip
SOLAR_OPEN = ModelFamily(
    name="solar_open",
    unread={**_AS_ALL, "intermediate_size": (), "first_k_dense_replace": (0,), "use_qk_norm": (False,)},
    architectures=("SolarOpenForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        **_GROUPS, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "head_dim": 128, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "n_shared_experts": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    from_hf=_solar,
    from_gguf=None,
)  # fmt: skip
