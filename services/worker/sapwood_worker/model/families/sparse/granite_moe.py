"""Granite 3's mixtures of experts, with and without an expert that every token goes to; Granite's factors as in dense models."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.dense.granite import GRANITE, GraniteDecoderLayer
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.values import HfValues, check_count, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    shared = values.get("shared_intermediate_size") or 0
    check_count("shared_intermediate_size", shared, 0)
    sparse = SparseConfig(
        read_routing(values, "num_local_experts", "num_experts_per_tok", renormalise=True),
        int(values["intermediate_size"]),
        shared=SharedExpert("shared_mlp", int(shared)) if shared else None,
        router="router.layer",
        stacked="rows",
    )
    return replace(GRANITE.from_hf(found), sparse=sparse)


def _fused(config: ModelConfig) -> FusedRows:
    sparse = config.sparse
    assert sparse is not None
    fused = {"mlp.experts.gate_up_proj": dict.fromkeys(
        ("mlp.experts.gate_proj", "mlp.experts.up_proj"), sparse.intermediate_size
    )}  # fmt: skip
    if sparse.shared is not None:
        inside, inner = "mlp.shared_mlp", sparse.shared.intermediate_size
        fused["mlp.input_linear"] = {f"{inside}.gate_proj": inner, f"{inside}.up_proj": inner}
        fused["mlp.output_linear"] = {f"{inside}.down_proj": config.hidden_size}
    return fused


GRANITE_MOE = ModelFamily(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    layer=GraniteDecoderLayer,
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    from_hf=_from_hf,
    from_gguf=None,
    renamed={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj", "block_sparse_moe": "mlp", "shared_mlp": "mlp",
    },
    by_rows=True,
    fused=_fused,
)  # fmt: skip
