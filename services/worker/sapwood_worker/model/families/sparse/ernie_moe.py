"""ERNIE 4.5 with experts: the dense one's layers, scores by softmax that are corrected where experts are chosen."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.dense.ernie import ERNIE4_5
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    if values.get("use_bias"):  # of the output head too
        raise ValueError("use_bias is not supported")
    width, shared = int(values["moe_intermediate_size"]), int(values["moe_num_shared_experts"])
    first, last = int(values["moe_layer_start_index"]), int(values["moe_layer_end_index"])
    every, last = int(values["moe_layer_interval"]), found.layers - 1 if last == -1 else last
    sparse = SparseConfig(
        read_routing(values, "moe_num_experts", "moe_k", renormalise=True),
        width,
        dense_layers=frozenset(at for at in range(found.layers) if (at + 1) % every or not first <= at <= last),
        shared=SharedExpert("shared_experts", width * shared) if shared else None,
        correction="moe_statics.e_score_correction_bias",
        correction_dims=2,
    )
    return replace(ERNIE4_5.from_hf(found), sparse=sparse)


_AS_ALL: dict[str, tuple[object, ...]] = {
    "compression_ratio": (1,), "moe_gate": ("topk",), "moe_use_aux_free": (True,), "use_rmsnorm": (True,), "freq_allocation": (),
    "rope_3d": (False,), "moe_group": (),
}  # fmt: skip

ERNIE4_5_MOE = ModelFamily(
    name="ernie4_5_moe",
    unread=_AS_ALL,
    architectures=("Ernie4_5_MoeForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": True, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "moe_num_experts": 64, "moe_k": 6,
        "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
    from_hf=_from_hf,
    from_gguf=None,
    skipped=("model.mtp_",),
)  # fmt: skip
