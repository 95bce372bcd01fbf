"""MiniMax-Text-01: lightning attention, and softmax attention in some layers; a residual stream of normed states."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig
from sapwood_worker.model.layers.state.lightning_attention import LightningConfig


class MiniMaxDecoderLayer(DecoderLayer):
    """What attention and MLP give is added to what they have got, normed, each with a factor."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.before_attention, self.before_mlp = map(self.norm, self.norm_names())
        self._kept, self._added, self._mlp_kept, self._mlp_added = config.factors[index % len(config.factors)]

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm", "post_attention_layernorm")

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        normed = self.before_attention(hidden)
        mixed = self.attention(normed, None, angles, plan)
        normed = self.before_mlp(normed * self._kept + mixed * self._added)
        result: Tensor = normed * self._mlp_kept + self.mlp(normed, None) * self._mlp_added
        return result


def _from_hf(found: HfValues) -> ModelConfig:
    values = found.values
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (index + 1) % 2 else "linear_attention" for index in range(found.layers)]
    if len(kinds) != found.layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise ValueError(f"layer_types has to say linear_attention or full_attention for each of {found.layers} layers")
    config = found.llama()
    lightning = LightningConfig(config.num_heads, config.head_dim, found.layers)

    def factors(kind: str) -> tuple[float, float, float, float]:
        names = f"{kind}_alpha_factor", f"{kind}_beta_factor", "mlp_alpha_factor", "mlp_beta_factor"
        kept, added, mlp_kept, mlp_added = (float(values[name]) for name in names)
        return kept, added, mlp_kept, mlp_added

    whole, linear = factors("full_attn"), factors("linear_attn")
    return replace(
        config,
        factors=tuple(whole if kind == "full_attention" else linear for kind in kinds),
        attending=tuple(kind == "full_attention" for kind in kinds),
        states=tuple(None if kind == "full_attention" else lightning for kind in kinds),
        sparse=SparseConfig(
            read_routing(values, "num_local_experts", "num_experts_per_tok", renormalise=True),
            int(values["intermediate_size"]),
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    )


MINIMAX = ModelFamily(
    name="minimax",
    architectures=("MiniMaxForCausalLM",),
    layer=MiniMaxDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "num_local_experts": 8,
        "num_experts_per_tok": 2, "full_attn_alpha_factor": 1, "full_attn_beta_factor": 1, "linear_attn_alpha_factor": 1,
        "linear_attn_beta_factor": 1, "mlp_alpha_factor": 1, "mlp_beta_factor": 1,
    },
    from_hf=_from_hf,
    from_gguf=None,
    unread={"block_size": ()},
)  # fmt: skip
