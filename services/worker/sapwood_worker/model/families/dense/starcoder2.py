"""StarCoder2: Llama's layers with LayerNorms, biases and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues
from sapwood_worker.model.layers.mlp import PlainConfig


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    if found.activation("hidden_act") != "gelu_tanh":
        raise ValueError(f"hidden_act: activation {values['hidden_act']!r} is not supported (gelu_pytorch_tanh is)")
    bias = bool(values["use_bias"])
    return replace(
        found.llama(gated=False),
        norm="layer",
        norm_bias=True,
        rms_norm_eps=float(values["norm_epsilon"]),
        windows=found.one_window(),
        plain_mlp=PlainConfig("gelu_tanh", "c_fc", "c_proj"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


STARCODER2 = ModelFamily(
    name="starcoder2",
    unread={"norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,), "activation_function": ()},
    architectures=("Starcoder2ForCausalLM",),
    classifiers=("Starcoder2ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": True, "rope_theta": 10_000.0, "norm_epsilon": 1e-5, "use_bias": True,
        "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
