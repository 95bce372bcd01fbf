"""Hunyuan 1, dense and with experts: Llama's layers, heads normed after their rotation; a shared expert as wide as the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rope = dict(values.get(key) or {})
    # Files call it dynamic, but with an alpha the base is stretched once for all lengths.
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
        found.given.idle(*(f"{key}.{name}" for name in rope))
        dim, theta = found.head_dim, float(rope.get("rope_theta", values["rope_theta"]))
        stretched = theta * float(rope["alpha"]) ** (dim / (dim - 2))
        found = replace(found, values=values.but({key: {"rope_type": "default", "rope_theta": stretched}}))
    return replace(found.llama(), qk_norm=True, qk_norm_kind="rotated")


def _moe(found: HfValues) -> ModelConfig:
    config, values = _from_hf(found), found.values
    chosen, experts = (_one(values[name], name) for name in ("moe_topk", "num_experts"))
    routing = read_routing({"moe_topk": chosen, "num_experts": experts}, "num_experts", "moe_topk", renormalise=True)
    shared = SharedExpert("shared_mlp", config.intermediate_size)
    return replace(config, sparse=SparseConfig(routing, config.intermediate_size, shared=shared, router="gate.wg"))


def _one(value: Any, name: str) -> int:
    """A number that may be given for each layer. Raises ValueError if layers differ."""
    each = set(value) if isinstance(value, list) else {value}
    if len(each) != 1:
        raise ValueError(f"{name} that differs between layers is not supported")
    return int(each.pop())


_DEFAULTS = {
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
}  # fmt: skip
_AS_ALL: dict[str, tuple[object, ...]] = {
    "eod_token_id": (), "sep_token_id": (), "use_qk_norm": (True,), "norm_type": ("rms",), "use_cla": (False,),
    "use_rotary_pos_emb": (True,), "attention_head_dim": (), "im_start_id": (), "im_end_id": (), "mask_init_id": (),
}  # fmt: skip

HUNYUAN = ModelFamily(
    name="hunyuan",
    unread=_AS_ALL,
    architectures=("HunYuanDenseV1ForCausalLM",),
    classifiers=("HunYuanDenseV1ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults=_DEFAULTS,
    from_hf=_from_hf,
    from_gguf=None,
)
HUNYUAN_MOE = ModelFamily(
    name="hunyuan_moe",
    unread=_AS_ALL,
    architectures=("HunYuanMoEV1ForCausalLM",),
    classifiers=("HunYuanMoEV1ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "num_experts": 1, "moe_topk": 1},
    from_hf=_moe,
    from_gguf=None,
)
