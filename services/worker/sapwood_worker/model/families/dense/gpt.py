"""GPT-2, GPT-BigCode (StarCoder 1, SantaCoder), GPT-Neo and OPT: a table of positions, LayerNorms, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily, fused_qkv
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, check_count
from sapwood_worker.model.layers.embedding import PositionConfig
from sapwood_worker.model.layers.mlp import PlainConfig

_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


def _common(
    found: HfValues, plain: PlainConfig, eps: str = "layer_norm_epsilon", *, shared: bool = False
) -> ModelConfig:
    """The configuration; ``shared``: queries share one head of keys and values."""
    heads = {"num_key_value_heads": 1 if shared else None}  # which these families do not read from the file
    config = replace(found, values=found.values.but(heads)).llama(gated=False)
    return replace(
        config,
        norm="layer",
        norm_bias=True,
        rms_norm_eps=float(found.values[eps]),
        plain_mlp=replace(plain, activation=found.plain_activation("activation_function")),
        ropes=(None,) * config.num_layers,
        positions=PositionConfig(config.max_position),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _with_inner(found: HfValues, name: str) -> HfValues:
    """The settings with the width inside the MLP, which is four times the model's if the file does not say."""
    inner = found.values.get(name)
    if inner is not None:
        check_count(name, inner, 1)
    return replace(found, values=found.values.but({"intermediate_size": inner or 4 * int(found.values["hidden_size"])}))


_MLP = PlainConfig("gelu_tanh", "c_fc", "c_proj")


def _gpt2(found: HfValues) -> ModelConfig:
    return _common(_with_inner(found.named(_NAMES), "n_inner"), _MLP)


def _big_code(found: HfValues) -> ModelConfig:
    found = _with_inner(found.named(_NAMES), "n_inner")
    return _common(found, _MLP, shared=bool(found.values["multi_query"]))


def _neo(found: HfValues) -> ModelConfig:
    found = found.named({"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"})
    values = found.values
    kinds = values.get("attention_layers")
    if kinds is None:
        kinds = [kind for each, times in values["attention_types"] for kind in each * times]
    values.idle("attention_types")
    if len(kinds) != found.layers or not set(kinds) <= {"global", "local"}:
        raise ValueError(f"attention_layers has to say global or local for each of {found.layers} layers")
    window = int(values["window_size"])
    config = _common(_with_inner(found, "intermediate_size"), _MLP)
    # Its attention has no scale and its queries, keys and values no biases.
    return replace(
        config,
        windows=tuple(window if kind == "local" else None for kind in kinds),
        attention_scale=1.0,
        qkv_bias=False,
    )


def _opt(found: HfValues) -> ModelConfig:
    values = found.values
    for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if not values.get(name, True):
            raise ValueError(f"{name} false is not supported")
    if values.get("word_embed_proj_dim", values["hidden_size"]) != values["hidden_size"]:
        raise ValueError("word_embed_proj_dim other than hidden_size is not supported")
    config = _common(found.named({"intermediate_size": "ffn_dim"}), PlainConfig("relu", "fc1", "fc2"), "layer_norm_eps")
    return replace(config, positions=PositionConfig(config.max_position, offset=2))


_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True, "rope_theta": 10_000.0, "layer_norm_epsilon": 1e-5, "n_positions": 1024, "n_embd": 768,
    "n_layer": 12, "n_head": 12, "vocab_size": 50_257, "activation_function": "gelu_new",
}  # fmt: skip
_PREFIXES = {
    f"{before}{theirs}": ours
    for before in ("transformer.", "")
    for theirs, ours in {
        "h.": "model.layers.", "wte.": "model.embed_tokens.", "wpe.": "model.embed_positions.", "ln_f.": "model.norm.",
    }.items()
}  # fmt: skip
_PREFIXES["lm_head."] = "lm_head."
_RENAMED = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
_ATTENTION = {"attn.c_attn": "self_attn.c_attn", "attn.c_proj": "self_attn.o_proj"}
_UNREAD: Mapping[str, tuple[object, ...]] = {
    "n_ctx": (), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (),
    "add_cross_attention": (False,), "resid_pdrop": (), "embd_pdrop": (), "attn_pdrop": (), "summary_*": (),
}  # fmt: skip

GPT2 = ModelFamily(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    classifiers=("GPT2ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults=_DEFAULTS,
    from_hf=_gpt2,
    from_gguf=None,
    prefixes=_PREFIXES,
    renamed={**_RENAMED, **_ATTENTION},
    fused=lambda config: fused_qkv(config, "c_attn"),
    transposed=True,
    unread=_UNREAD,
)
GPT_BIGCODE = ModelFamily(
    name="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    classifiers=("GPTBigCodeForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    from_hf=_big_code,
    from_gguf=None,
    prefixes=_PREFIXES,
    renamed={**_RENAMED, **_ATTENTION},
    fused=lambda config: fused_qkv(config, "c_attn"),
    groups=lambda config: config.num_kv_heads,
    unread={
        **_UNREAD, "attention_softmax_in_fp32": (), "scale_attention_softmax_in_fp32": (), "inference_runner": (),
        "validate_runner_input": (), "pre_allocate_kv_cache": (), "max_batch_size": (), "max_sequence_length": (),
    },
)  # fmt: skip
GPT_NEO = ModelFamily(
    name="gpt_neo",
    architectures=("GPTNeoForCausalLM",),
    classifiers=("GPTNeoForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": True, "rope_theta": 10_000.0, "layer_norm_epsilon": 1e-5, "window_size": 256,
        "max_position_embeddings": 2048, "activation_function": "gelu_new", "vocab_size": 50_257,
    },
    from_hf=_neo,
    from_gguf=None,
    prefixes=_PREFIXES,
    renamed={
        **_RENAMED, "attn.attention.out_proj": "self_attn.o_proj", "attn.attention": "self_attn",
    },
    unread={**_UNREAD, "resid_dropout": (), "embed_dropout": (), "gradient_checkpointing": ()},
)  # fmt: skip
OPT = ModelFamily(
    name="opt",
    architectures=("OPTForCausalLM",),
    classifiers=("OPTForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": True, "rope_theta": 10_000.0, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "activation_function": "relu", "vocab_size": 50_272, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "ffn_dim": 3072,
    },
    from_hf=_opt,
    from_gguf=None,
    prefixes={
        f"{before}decoder.{theirs}": ours
        for before in ("model.", "")
        for theirs, ours in {
            "layers.": "model.layers.", "embed_tokens.": "model.embed_tokens.", "embed_positions.": "model.embed_positions.",
            "final_layer_norm.": "model.norm.",
        }.items()
    } | {"lm_head.": "lm_head."},
    renamed={
        "self_attn_layer_norm": "input_layernorm", "final_layer_norm": "post_attention_layernorm", "fc1": "mlp.fc1",
        "fc2": "mlp.fc2", "self_attn.out_proj": "self_attn.o_proj",
    },
    unread={
        "_remove_final_layer_norm": (False,), "layerdrop": (),
        "activation_dropout": (), "init_std": (), "dropout": (), "prefix": (),
    },
)  # fmt: skip
