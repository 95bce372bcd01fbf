"""Phi-3, Phi-3.5 and Phi-4, except the mixtures of experts and the multimodal models: Llama's layers in fewer tensors."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily, fused_gate_up, fused_qkv
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import ROPE_LONG, ROPE_SHORT, GgufValues
from sapwood_worker.model.layers.rotary import LongRopeScaling


def _from_gguf(values: GgufValues) -> ModelConfig:
    config = values.llama(partly_rotated=True)
    window = values.count("attention.sliding_window", 0, least=0)  # 0: there is none
    [rope] = set(config.ropes)
    long, short = (values.rope_tensors.get(name) for name in (ROPE_LONG, ROPE_SHORT))
    if rope is not None and long is not None and short is not None:
        original = values.count("rope.scaling.original_context_length")
        magnitude = float(values.get("rope.scaling.attn_factor", 1.0))
        rope = replace(rope, scaling=LongRopeScaling(short, long, original, magnitude))
    layers = config.num_layers
    return replace(config, windows=(window or None,) * layers, ropes=(rope,) * layers)


PHI3 = ModelFamily(
    name="phi3",
    unread={"interpolate_factor": (1,), "full_attn_mod": (1,), "use_lora": (False,)},
    architectures=("Phi3ForCausalLM",),
    classifiers=("Phi3ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
    },
    from_hf=lambda found: replace(found.llama(), windows=found.one_window()),
    from_gguf=_from_gguf,
    gguf_names={"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj"},
    fused=lambda config: {**fused_qkv(config), **fused_gate_up(config)},
)
