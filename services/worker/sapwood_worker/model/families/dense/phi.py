"""Phi 1, 1.5 and 2, and GPT-J: one LayerNorm before attention and MLP side by side, part of a head turned, a head with a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import ParallelDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.values import HfValues, check_count
from sapwood_worker.model.layers.mlp import PlainConfig


def _common(found: HfValues, plain: PlainConfig, eps: str, activation: str) -> ModelConfig:
    return replace(
        found.llama(gated=False),
        norm="layer",
        norm_bias=True,
        rms_norm_eps=float(found.values[eps]),
        plain_mlp=replace(plain, activation=found.plain_activation(activation)),
        mlp_bias=True,
        head_bias=True,
    )


def _phi(found: HfValues) -> ModelConfig:
    if found.values.get("qk_layernorm"):
        raise ValueError("qk_layernorm is not supported")
    config = _common(found, PlainConfig("gelu_tanh", "fc1", "fc2"), "layer_norm_eps", "hidden_act")
    return replace(config, qkv_bias=True, output_bias=True)


def _gptj(found: HfValues) -> ModelConfig:
    names = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }  # fmt: skip
    found = found.interleaved().named(names)
    values, inner = found.values, found.values.get("n_inner")
    for name in ("n_inner", "rotary_dim"):
        if values.get(name) is not None:
            check_count(name, values[name], 1)
    changes: dict[str, Any] = {
        "num_key_value_heads": None,
        "intermediate_size": inner or 4 * int(values["hidden_size"]),
    }
    if values.get("rotary_dim") is not None:
        changes["partial_rotary_factor"] = int(values["rotary_dim"]) / found.head_dim
    found = replace(found, values=values.but(changes))
    return _common(found, PlainConfig("gelu_tanh", "fc_in", "fc_out"), "layer_norm_epsilon", "activation_function")


PHI = ModelFamily(
    name="phi",
    architectures=("PhiForCausalLM",),
    classifiers=("PhiForSequenceClassification",),
    layer=ParallelDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "max_position_embeddings": 2048, "hidden_act": "gelu_new",
    },
    from_hf=_phi,
    from_gguf=None,
    prefixes={"model.final_layernorm.": "model.norm.", "model.": "model.", "lm_head.": "lm_head."},
    renamed={"self_attn.dense": "self_attn.o_proj"},
    unread={"resid_pdrop": (), "embd_pdrop": ()},
)  # fmt: skip
GPTJ = ModelFamily(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    classifiers=("GPTJForSequenceClassification",),
    layer=ParallelDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "layer_norm_epsilon": 1e-5, "n_positions": 2048, "rotary_dim": 64,
        "activation_function": "gelu_new", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50_400,
    },
    from_hf=_gptj,
    from_gguf=None,
    prefixes={
        f"{before}{theirs}": ours
        for before in ("transformer.", "")
        for theirs, ours in {"h.": "model.layers.", "wte.": "model.embed_tokens.", "ln_f.": "model.norm."}.items()
    } | {"lm_head.": "lm_head."},
    renamed={"ln_1": "input_layernorm", "attn.out_proj": "self_attn.o_proj", "attn": "self_attn"},
    unread={
        "resid_pdrop": (), "embd_pdrop": (), "attn_pdrop": (), "summary_*": (), "n_ctx": (), "rotary": (True,),
        "scale_attn_weights": (True,), "gradient_checkpointing": (),
    },
)  # fmt: skip
