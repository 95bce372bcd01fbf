"""Phi-3, Phi-3.5 and Phi-4, but for the mixtures of experts and those that see or hear: Llama's layers in fewer tensors."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.fused import fused_gate_up, fused_qkv
from sapwood_worker.model.families.llama import LlamaDecoderLayer

PHI3 = ModelFamily(
    name="phi3",
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
    from_gguf=None,
    fused=lambda config: {**fused_qkv(config), **fused_gate_up(config)},
)
