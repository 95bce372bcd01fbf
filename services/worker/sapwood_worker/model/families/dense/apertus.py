"""Apertus: Llama's layers with norms of heads, and an MLP without a gate whose activation has learned strengths."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues
from sapwood_worker.model.layers.mlp import PlainConfig


def _from_hf(found: HfValues) -> ModelConfig:
    if found.values["hidden_act"] != "xielu":
        raise ValueError(f"hidden_act: activation {found.values['hidden_act']!r} is not supported (xielu is)")
    return replace(found.llama(gated=False), plain_mlp=PlainConfig("xielu"), qk_norm=True)


APERTUS = ModelFamily(
    name="apertus",
    architectures=("ApertusForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 12_000_000.0, "rms_norm_eps": 1e-5, "hidden_act": "xielu",
        "max_position_embeddings": 65_536,
    },
    from_hf=_from_hf,
    from_gguf=None,
    renamed={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
    unread={"post_norm": (False,), "qk_norm": (True,), "mlp_bias": (False,)},
)  # fmt: skip
