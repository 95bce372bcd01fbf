"""Families with the layers of Mamba 2: Mamba 2 itself, Bamba, Granite 4, Falcon-H1 and Nemotron-H."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer, SingleDecoderLayer
from sapwood_worker.model.families.dense.granite import GraniteDecoderLayer
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import HfValues, read_routing
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.mlp import GatedMLP, PlainConfig
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig
from sapwood_worker.model.layers.state.mamba2 import Mamba2Config


def _limits(given: Any) -> tuple[float, float]:
    """``time_step_limit``; transformers writes infinity as an object. Raises ValueError: it is no pair."""
    if given is None:
        return 0.0, float("inf")
    if len(given) != 2:
        raise ValueError(f"time_step_limit is {given!r:.60}; it can be a pair of numbers")
    low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in given)
    return low, high


def _mamba(values: Mapping[str, Any], eps: float) -> Mamba2Config:
    """The layer by the names that most hybrids have."""
    heads, dim = int(values["mamba_n_heads"]), values["mamba_d_head"]
    inner = int(values["mamba_expand"]) * int(values["hidden_size"])
    if values.get("mamba_d_ssm") is not None:
        inner = int(values["mamba_d_ssm"])
    dim = inner // heads if dim == "auto" else int(dim)
    if heads * dim != inner:
        raise ValueError(f"mamba_n_heads {heads} times mamba_d_head {dim} is not {inner}, the width of the layer")
    bias = bool(values["mamba_proj_bias"])
    return Mamba2Config(
        heads,
        dim,
        int(values["mamba_n_groups"]),
        int(values["mamba_d_state"]),
        int(values["mamba_d_conv"]),
        eps,
        convolution_bias=bool(values["mamba_conv_bias"]),
        bias=bias,
        output_bias=bias,
        step_limits=_limits(values.get("time_step_limit")),
    )


def _fused(config: ModelConfig) -> FusedRows:
    return next(each for each in config.states if isinstance(each, Mamba2Config)).fused


_HYBRID = {
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
_UNREAD: dict[str, tuple[Any, ...]] = {
    "mamba_chunk_size": (), "chunk_size": (), "num_logits_to_keep": (), "z_loss_coefficient": (), "use_mamba_kernels": (),
    "mamba_use_mlp": (True,), "mamba_hidden_act": ("silu",), "residual_in_fp32": (), "rescale_prenorm_residual": (),
    "layer_types": ("linear_attention", "full_attention", "hybrid", "mlp"), "layers_block_type": (), "mamba_ssm_cache_dtype": (),
}  # fmt: skip
"""Of other programs' kernels and of training; the layers are read from what says it first."""


def _kinds(found: HfValues, kinds: Any, known: Mapping[str, str]) -> list[str]:
    """The kinds of layers, by our names. Raises ValueError: one is another, or there are too few."""
    if not isinstance(kinds, list) or len(kinds) != found.layers or not set(kinds) <= known.keys():
        raise ValueError(f"layer_types has to say one of {', '.join(known)} for each of {found.layers} layers")
    return [known[kind] for kind in kinds]


# Bamba.


def _bamba(found: HfValues) -> ModelConfig:
    values = found.values
    attending = list(values.get("attn_layer_indices") or ())
    values = values.but({"partial_rotary_factor": 0.5})  # which transformers does not read from the file either
    found.values.idle("partial_rotary_factor", "rope_parameters.partial_rotary_factor")
    rope = {**(values.get("rope_parameters") or values.get("rope_scaling") or {}), "partial_rotary_factor": 0.5}
    config = replace(found, values=values).llama()
    config = replace(config, ropes=(found.rope(rope, float(values["rope_theta"])),) * found.layers)
    mamba = _mamba(values, config.rms_norm_eps)
    whole = tuple(index in attending for index in range(found.layers))
    return replace(config, attending=whole, states=tuple(None if each else mamba for each in whole))


BAMBA = ModelFamily(
    name="bamba",
    architectures=("BambaForCausalLM",),
    layer=LlamaDecoderLayer,
    defaults={**_HYBRID, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144},
    from_hf=_bamba,
    from_gguf=None,
    renamed={"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"},
    fused=_fused,
    unread=_UNREAD,
)


# Granite 4.


def _granite(found: HfValues) -> ModelConfig:
    values = found.values
    kinds = values.get("layer_types") or values.get("layers_block_type") or ["mamba"] * found.layers
    known = {"mamba": "mamba", "linear_attention": "mamba", "attention": "whole", "full_attention": "whole"}
    named = _kinds(found, kinds, known)
    config = found.llama()
    mamba = _mamba(values, config.rms_norm_eps)
    shared, experts = int(values["shared_intermediate_size"]), int(values.get("num_local_experts", 8))
    sparse = None
    if experts:
        sparse = SparseConfig(
            read_routing(values, "num_local_experts", "num_experts_per_tok", renormalise=True),
            int(values["intermediate_size"]),
            shared=SharedExpert("shared_mlp", shared),
            router="router.layer",
            stacked="rows",
        )
    else:
        values.idle("num_experts_per_tok", "intermediate_size")
    turned = values.get("position_embedding_type") == "rope"
    return replace(
        config,
        intermediate_size=shared,
        ropes=config.ropes if turned else (None,) * found.layers,
        embedding_scale=float(values["embedding_multiplier"]),
        attention_scale=float(values["attention_multiplier"]),
        residual_scale=float(values["residual_multiplier"]),
        logit_scale=1.0 / float(values["logits_scaling"]),
        sparse=sparse,
        attending=tuple(kind == "whole" for kind in named),
        states=tuple(mamba if kind == "mamba" else None for kind in named),
    )


def _fused_granite(config: ModelConfig) -> FusedRows:
    inside = "mlp" if config.sparse is None else "mlp.shared_mlp"
    rows = dict.fromkeys((f"{inside}.gate_proj", f"{inside}.up_proj"), config.intermediate_size)
    fused = {**_fused(config), "mlp.input_linear": rows}
    fused["mlp.output_linear"] = {f"{inside}.down_proj": config.hidden_size}
    if config.sparse is not None:
        inner = config.sparse.intermediate_size
        fused["mlp.experts.gate_up_proj"] = {"mlp.experts.gate_proj": inner, "mlp.experts.up_proj": inner}
    return fused


# Falcon-H1: attention and Mamba 2 side by side in every layer.


class FalconH1DecoderLayer(DecoderLayer):
    """One norm, then attention and a state space side by side; then the MLP. Each has factors."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        state = config.states[index]
        assert state is not None
        self.state = state.build(config.hidden_size, index, context.attending.inside(state.name))
        self.before, self.before_mlp = map(self.norm, self.norm_names())
        self._inside, self._outside, self._gate, self._down = config.factors[0]

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm", "pre_ff_layernorm")

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        normed = self.before(hidden)
        mixed = self.state(normed, None, angles, plan)
        mixed = mixed + self.attention(normed * self._inside, None, angles, plan) * self._outside
        hidden += mixed
        assert isinstance(self.mlp, GatedMLP)
        gate, up = self.mlp.gate_up(hidden, self.before_mlp).chunk(2, 1)
        hidden += self.mlp.down(F.silu(gate * self._gate) * up) * self._down
        return hidden


def _falcon(found: HfValues) -> ModelConfig:
    values = found.values
    config = found.llama()
    bias = bool(values["mamba_proj_bias"])
    output_bias = bool(values["projectors_bias"])
    scale = float(values["ssm_out_multiplier"])
    if output_bias and scale != 1.0:
        raise ValueError("projectors_bias with an ssm_out_multiplier other than 1 is not supported")
    norm: Literal["behind", "before", "none"] = "none"
    if values["mamba_rms_norm"]:
        norm = "before" if values["mamba_norm_before_gate"] else "behind"
    else:
        values.idle("mamba_norm_before_gate")
    z, x, b, c, step = values.get("ssm_multipliers") or [1.0] * 5
    gate, down = values.get("mlp_multipliers") or (1.0, 1.0)
    sides = float(values["attention_in_multiplier"]), float(values["attention_out_multiplier"])
    mamba = replace(
        _mamba(values, config.rms_norm_eps),
        bias=bias,
        output_bias=output_bias,
        norm=norm,
        input_scale=float(values["ssm_in_multiplier"]),
        scales=(float(z), float(x), float(b), float(c), float(step)),
        output_scale=scale,
    )
    return replace(
        config,
        embedding_scale=float(values["embedding_multiplier"]),
        attention_scale=config.attention_scale * float(values["key_multiplier"]),
        logit_scale=float(values["lm_head_multiplier"]),
        factors=((*sides, float(gate), float(down)),),
        states=(mamba,) * found.layers,
    )  # fmt: skip


FALCON_H1 = ModelFamily(
    name="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    layer=FalconH1DecoderLayer,
    defaults={
        **_HYBRID, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "projectors_bias": False,
        "mamba_rms_norm": False, "mamba_norm_before_gate": True, "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0,
        "key_multiplier": 1.0, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    from_hf=_falcon,
    from_gguf=None,
    renamed={"feed_forward": "mlp", "final_layernorm": "norm"},
    fused=_fused,
    unread={**_UNREAD, "attn_layer_indices": (), "mlp_expansion_factor": ()},
)  # fmt: skip


# Nemotron-H: each layer is one of Mamba 2, attention and an MLP.


_PATTERN = {"M": "mamba", "*": "whole", "-": "mlp"}
_NEMOTRON = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "whole", "full_attention": "whole", "mlp": "mlp",
}  # fmt: skip


def _nemotron(found: HfValues) -> ModelConfig:
    values = found.values
    kinds = values.get("layers_block_type") or values.get("layer_types")
    if kinds is None:
        pattern = str(values["hybrid_override_pattern"])
        if not set(pattern) <= _PATTERN.keys():
            raise ValueError(
                f"hybrid_override_pattern {pattern!r:.60} has letters other than {', '.join(_PATTERN)}: "
                "mixtures of experts without a gate are not supported"
            )
        named = [_PATTERN[letter] for letter in pattern]
    else:
        values.idle("hybrid_override_pattern")
        if not set(kinds) <= _NEMOTRON.keys():
            raise ValueError(
                f"layers_block_type has kinds other than {', '.join(_NEMOTRON)}: mixtures of experts without a gate are not "
                "supported"
            )
        named = [_NEMOTRON[kind] for kind in kinds]
    if values.get("num_hidden_layers") not in (None, len(named)):
        raise ValueError(f"num_hidden_layers is {values['num_hidden_layers']}, but {len(named)} layers are described")
    values = values.but({"num_hidden_layers": len(named)})
    found = replace(found, values=values)
    if values["mlp_hidden_act"] != "relu2":
        raise ValueError(f"mlp_hidden_act is {values['mlp_hidden_act']!r:.60}; it can be relu2")
    eps, bias = float(values["layer_norm_epsilon"]), bool(values["use_bias"])
    values.idle("mamba_proj_bias", "attention_bias", "num_hidden_layers")
    mamba = Mamba2Config(
        int(values["mamba_num_heads"]),
        int(values["mamba_head_dim"]),
        int(values["n_groups"]),
        int(values["ssm_state_size"]),
        int(values["conv_kernel"]),
        eps,
        convolution_bias=bool(values["use_conv_bias"]),
        bias=bias,
        output_bias=bias,
        step_limits=(float(values["time_step_min"]), float("inf")),
        name="mixer",
    )
    return replace(
        found.llama(gated=False),
        rms_norm_eps=eps,
        qkv_bias=False,
        output_bias=False,
        ropes=(None,) * len(named),
        plain_mlp=PlainConfig("relu2"),
        single=True,
        attending=tuple(kind == "whole" for kind in named),
        states=tuple(mamba if kind == "mamba" else None for kind in named),
    )


NEMOTRON_H = ModelFamily(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    layer=SingleDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "max_position_embeddings": 4096, "head_dim": 128,
        "num_key_value_heads": 8, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
        "time_step_min": 0.001, "intermediate_size": 21_504,
    },
    from_hf=_nemotron,
    from_gguf=None,
    prefixes={"backbone.": "model."},
    renamed={"embeddings": "embed_tokens", "norm_f": "norm"},
    fused=_fused,
    unread={
        **_UNREAD, "expand": (), "time_step_max": (), "time_step_floor": (), "time_step_limit": (), "hidden_act": (),
        "moe_intermediate_size": (), "moe_shared_expert_intermediate_size": (), "moe_shared_expert_overlap": (),
        "moe_latent_size": (), "n_routed_experts": (), "n_shared_experts": (), "num_experts_per_tok": (), "norm_topk_prob": (),
        "routed_scaling_factor": (), "n_group": (), "topk_group": (), "mtp_layers_block_type": (), "rms_norm_eps": (),
        "mtp_hybrid_override_pattern": (),
    },
)  # fmt: skip


# Mamba 2 itself.


def _mamba2(found: HfValues) -> ModelConfig:
    values = found.values
    heads, dim = int(values["num_heads"]), int(values["head_dim"])
    width = int(values["hidden_size"])
    if heads * dim != int(values["expand"]) * width:
        raise ValueError(
            f"num_heads {heads} times head_dim {dim} is not expand {values['expand']} times hidden_size {width}"
        )
    eps, bias = float(values["layer_norm_epsilon"]), bool(values["use_bias"])
    mamba = Mamba2Config(
        heads,
        dim,
        int(values["n_groups"]),
        int(values["state_size"]),
        int(values["conv_kernel"]),
        eps,
        convolution_bias=bool(values["use_conv_bias"]),
        bias=bias,
        output_bias=bias,
        step_limits=_limits(values.get("time_step_limit")),
        name="mixer",
    )
    # Attention and MLP that no layer has: sizes that any number of ranks divides.
    absent = {"num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 64, "head_dim": 64}
    config = replace(found, values=values.but(absent)).llama()
    count = found.layers
    return replace(
        config,
        rms_norm_eps=eps,
        ropes=(None,) * count,
        attending=(False,) * count,
        states=(mamba,) * count,
        single=True,
    )


MAMBA2 = ModelFamily(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    layer=SingleDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "max_position_embeddings": 1 << 20, "num_heads": 128,
        "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2, "use_bias": False,
        "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    },
    from_hf=_mamba2,
    from_gguf=None,
    prefixes={"backbone.": "model."},
    renamed={"embeddings": "embed_tokens", "embedding": "embed_tokens", "norm_f": "norm"},
    fused=_fused,
    unread={
        **_UNREAD, "time_step_rank": (), "time_step_min": (), "time_step_max": (), "time_step_floor": (), "rms_norm": (True,),
        "norm_before_gate": (), "intermediate_size": (), "num_attention_heads": (), "num_key_value_heads": (),
    },
)  # fmt: skip


GRANITE_MOE_HYBRID = ModelFamily(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    layer=GraniteDecoderLayer,
    defaults={
        **_HYBRID, "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        "shared_intermediate_size": 1024, "intermediate_size": 11_008, "max_position_embeddings": 2048,
    },
    from_hf=_granite,
    from_gguf=None,
    renamed={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj", "block_sparse_moe": "mlp", "shared_mlp": "mlp",
    },
    by_rows=True,
    fused=_fused_granite,
    unread={**_UNREAD, "attn_layer_indices": (), "normalization_function": ("rmsnorm",), "init_method": ()},
)  # fmt: skip
