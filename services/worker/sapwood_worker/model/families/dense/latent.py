"""Dense models with latent attention: Youtu-LLM, and MiniCPM 3 with factors on embedding, residuals and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.dense.granite import GraniteDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import LATENT_DEFAULTS, HfValues, read_latent


def _minicpm3(found: HfValues) -> ModelConfig:
    values, width = found.values, int(found.values["hidden_size"])
    values = values.but({"v_head_dim": values.get("v_head_dim", width // int(values["num_attention_heads"]))})
    config = read_latent(replace(found, values=values))
    return replace(
        config,
        embedding_scale=float(values["scale_emb"]),
        residual_scale=float(values["scale_depth"]) / math.sqrt(config.num_layers),
        logit_scale=int(values["dim_model_base"]) / width,
    )


YOUTU = ModelFamily(
    name="youtu",
    unread={"head_dim": ()},
    architectures=("YoutuForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={**LATENT_DEFAULTS, "tie_word_embeddings": True},
    from_hf=read_latent,
    from_gguf=None,
)
MINICPM3 = ModelFamily(
    name="minicpm3",
    unread={"head_dim": ()},
    architectures=("MiniCPM3ForCausalLM",),
    classifiers=("MiniCPM3ForSequenceClassification",),
    layer=GraniteDecoderLayer,
    defaults={
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rope_interleave": False,
        "rope_theta": 10_000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "scale_emb": 12, "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    from_hf=_minicpm3,
    from_gguf=None,
)  # fmt: skip
