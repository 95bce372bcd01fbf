"""GLM-4, dense: half of each head is turned, neighbours together; the later models have norms after attention and MLP, too."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import SandwichDecoderLayer
from sapwood_worker.model.families.family import ModelFamily, fused_gate_up
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues


class Glm4DecoderLayer(SandwichDecoderLayer):
    """Norms before and after attention and MLP, by other names than Gemma's."""

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _from_hf(found: HfValues) -> ModelConfig:
    # The output projection has no bias, whatever the others have.
    return replace(found.interleaved().llama(), output_bias=False)


_DEFAULTS = {
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2,
    "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip

GLM = ModelFamily(
    name="glm",
    architectures=("GlmForCausalLM",),
    classifiers=("GlmForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults=_DEFAULTS,
    from_hf=_from_hf,
    from_gguf=None,
    fused=fused_gate_up,
)
GLM4 = ModelFamily(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    classifiers=("Glm4ForSequenceClassification",),
    layer=Glm4DecoderLayer,
    defaults=_DEFAULTS,
    from_hf=_from_hf,
    from_gguf=None,
    fused=fused_gate_up,
)
