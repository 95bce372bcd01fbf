"""Gemma 1 and 2, and VaultGemma."""

from __future__ import annotations

import math
from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer, SandwichDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues
from sapwood_worker.model.layers.layer import LayerContext

# Of Gemma 2's 27B, whose scale of attention GGUF files do not state.
_27B_LAYERS = 46


def _common(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        embedding_scale=math.sqrt(config.hidden_size),
        norm_offset=1.0,
        activation="gelu_tanh",
        final_softcap=None,
    )


def _gemma(found: HfValues) -> ModelConfig:
    # The first files say "gelu" and mean its approximation.
    act = {"gelu": "gelu_pytorch_tanh"}.get(found.values["hidden_act"], found.values["hidden_act"])
    if act != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_act: activation {act!r} is not supported (gelu_pytorch_tanh is)")
    return _common(replace(found, values=found.values.but({"hidden_act": act})).llama())


def _gemma2(found: HfValues) -> ModelConfig:
    values = found.values
    kinds = values.get("layer_types") or _kinds(found.layers)
    return replace(
        _common(found.llama()),
        windows=found.windows(kinds),
        activation=found.activation("hidden_activation"),
        attention_scale=float(values["query_pre_attn_scalar"]) ** -0.5,
        # null in a file is none, which is not the default.
        attention_softcap=found.given.get("attn_logit_softcapping", values["attn_logit_softcapping"]),
        final_softcap=found.given.get("final_logit_softcapping", values["final_logit_softcapping"]),
    )


def _gemma2_gguf(values: GgufValues) -> ModelConfig:
    config = values.llama()
    window = values.count("attention.sliding_window", 4096)
    scale = config.attention_scale
    if config.num_layers == _27B_LAYERS:
        scale = (config.hidden_size // config.num_heads) ** -0.5
    return replace(
        _common(config),
        windows=tuple(window if kind == "sliding_attention" else None for kind in _kinds(config.num_layers)),
        attention_scale=scale,
        attention_softcap=float(values.get("attn_logit_softcapping", 50.0)),
        final_softcap=float(values.get("final_logit_softcapping", 30.0)),
    )


class VaultGemmaDecoderLayer(LlamaDecoderLayer):
    """Gemma 2's without norms after attention and MLP."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        DecoderLayer.__init__(self, config, index, context)
        self.first_norm = self.before_attention = self.norm("input_layernorm")
        self.before_mlp = self.norm("pre_feedforward_layernorm")

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm", "pre_feedforward_layernorm")


def _kinds(layers: int) -> list[str]:
    return ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]


_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 10_000.0}

GEMMA = ModelFamily(
    name="gemma",
    unread={"hidden_activation": ("gelu_pytorch_tanh",)},
    architectures=("GemmaForCausalLM",),
    classifiers=("GemmaForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={**_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    from_hf=_gemma,
    from_gguf=lambda values: _common(values.llama()),
)
GEMMA2 = ModelFamily(
    name="gemma2",
    unread={"hidden_act": ("gelu_pytorch_tanh",)},
    architectures=("Gemma2ForCausalLM",),
    classifiers=("Gemma2ForSequenceClassification",),
    layer=SandwichDecoderLayer,
    defaults={
        **_DEFAULTS,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    from_hf=_gemma2,
    from_gguf=_gemma2_gguf,
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
VAULT_GEMMA = ModelFamily(
    name="vaultgemma",
    unread=GEMMA2.unread,
    architectures=("VaultGemmaForCausalLM",),
    layer=VaultGemmaDecoderLayer,
    defaults=GEMMA2.defaults,
    from_hf=_gemma2,
    from_gguf=None,
)
