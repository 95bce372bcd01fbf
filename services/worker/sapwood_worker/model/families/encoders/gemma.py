"""EmbeddingGemma: Gemma 3's layers, whose tokens see each other in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_worker.model.families.encoders.encoder import EncoderConfig, EncoderFamily, Rotation, shape, within
from sapwood_worker.model.families.values import Settings, check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaEncoderConfig(EncoderConfig):
    """The shape of a model.

    Attributes:
        num_key_value_heads: Heads of keys and values.
        head_dim: Elements of a head.
        rms_norm_eps: Added to the mean square in each norm.
        attention_scale: Factor of products of queries and keys.
        reaches: For each layer how many positions a token sees to either side; None: all.
        thetas: The base of each layer's rotary frequencies.
    """

    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_scale: float
    reaches: tuple[int | None, ...]
    thetas: tuple[float, ...]


class GemmaNorm(nn.Module):
    """Root-mean-square norm whose checkpoints store w of 1 + w."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N], computed in float32."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class GemmaEncoderLayer(nn.Module):
    """Norms before and after attention and MLP. Parameters are named as in checkpoints."""

    def __init__(self, config: GemmaEncoderConfig, index: int) -> None:
        super().__init__()
        size, inner, dim, eps = config.hidden_size, config.intermediate_size, config.head_dim, config.rms_norm_eps
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._scale, self._shared = dim, config.attention_scale, heads // keys
        self.reach = config.reaches[index]
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(size, heads * dim, bias=False),
                "k_proj": nn.Linear(size, keys * dim, bias=False),
                "v_proj": nn.Linear(size, keys * dim, bias=False),
                "o_proj": nn.Linear(heads * dim, size, bias=False),
                "q_norm": GemmaNorm(dim, eps),
                "k_norm": GemmaNorm(dim, eps),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, inner, bias=False),
                "up_proj": nn.Linear(size, inner, bias=False),
                "down_proj": nn.Linear(inner, size, bias=False),
            }
        )
        self.input_layernorm = GemmaNorm(size, eps)
        self.post_attention_layernorm = GemmaNorm(size, eps)
        self.pre_feedforward_layernorm = GemmaNorm(size, eps)
        self.post_feedforward_layernorm = GemmaNorm(size, eps)
        self.rotation = Rotation(dim, config.thetas[index])

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[B, T, hidden_size] -> the same shape; ``mask``, bool [B, 1, T or 1, T], is true where a token is seen."""
        parts, normed = self.self_attn, self.input_layernorm(hidden)
        query, key, value = (
            parts[f"{name}_proj"](normed).view(*hidden.shape[:2], -1, self._dim).transpose(1, 2) for name in "qkv"
        )
        query, key = self.rotation(parts["q_norm"](query)), self.rotation(parts["k_norm"](key))
        key, value = (each.repeat_interleave(self._shared, 1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self._scale)
        attended = parts["o_proj"](mixed.transpose(1, 2).flatten(2))
        hidden = hidden + self.post_attention_layernorm(attended)
        normed, mlp = self.pre_feedforward_layernorm(hidden), self.mlp
        inner = F.gelu(mlp["gate_proj"](normed), approximate="tanh") * mlp["up_proj"](normed)
        result: Tensor = hidden + self.post_feedforward_layernorm(mlp["down_proj"](inner))
        return result


class GemmaEncoder(nn.Module):
    """The encoder."""

    def __init__(self, config: GemmaEncoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GemmaEncoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self._scale = config.hidden_size**0.5

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """int64 [B, T] and a bool mask [B, T], true where there is a token -> [B, T, hidden_size]."""
        hidden: Tensor = self.embed_tokens(token_ids)
        hidden = hidden * torch.tensor(self._scale, dtype=hidden.dtype, device=hidden.device)
        every = mask[:, None, None]
        seen: dict[int | None, Tensor] = {}
        for layer in self.layers:
            assert isinstance(layer, GemmaEncoderLayer)
            if layer.reach not in seen:
                near = within(token_ids.shape[1], layer.reach, token_ids.device)
                itself = torch.eye(token_ids.shape[1], dtype=torch.bool, device=token_ids.device)
                seen[layer.reach] = every if near is None else every & near | itself
            hidden = layer(hidden, seen[layer.reach])
        result: Tensor = self.norm(hidden)
        return result


def _read(values: Settings, path: Path) -> GemmaEncoderConfig:
    if values.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ValueError(
            f"hidden_activation {values['hidden_activation']!r:.60} is not supported (gelu_pytorch_tanh is)"
        )
    for name in ("num_key_value_heads", "head_dim", "sliding_window"):
        check_count(name, values[name], 1)
    numbers = shape(values, whole=False)
    layers, keys = numbers["num_hidden_layers"], int(values["num_key_value_heads"])
    if numbers["num_attention_heads"] % keys:
        raise ValueError(
            f"num_attention_heads {numbers['num_attention_heads']} is no multiple of num_key_value_heads {keys}"
        )
    every = int(values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or 6)
    kinds = values.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has to say sliding_attention or full_attention for each of {layers} layers")
    ropes = values.get("rope_parameters") or {}
    if values.get("rope_scaling"):
        raise ValueError("rope_scaling is not supported with use_bidirectional_attention")
    bases = {}
    for kind, name in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        rope = ropes.get(kind) or {}
        if (given := rope.get("rope_type", "default")) != "default":
            raise ValueError(
                f"rope_parameters.{kind}: rotary embedding type {given!r:.60} is not supported (default is)"
            )
        bases[kind] = float(rope.get("rope_theta", values[name]))
    # Half of the window lies to either side; transformers takes the bound itself out.
    reach = int(values["sliding_window"]) // 2
    return GemmaEncoderConfig(
        **numbers,
        num_key_value_heads=keys,
        head_dim=int(values["head_dim"]),
        rms_norm_eps=float(values["rms_norm_eps"]),
        attention_scale=float(values["query_pre_attn_scalar"]) ** -0.5,
        reaches=tuple(reach if kind == "sliding_attention" else None for kind in kinds),
        thetas=tuple(bases[kind] for kind in kinds),
    )


def _both_ways(values: Mapping[str, Any]) -> bool:
    return values.get("use_bidirectional_attention") is True


GEMMA_ENCODER = EncoderFamily(
    name="embedding_gemma",
    architectures=("Gemma3TextModel", "Gemma3Model"),
    read=_read,
    build=GemmaEncoder,
    renamed={"^model.": ""},
    unread=("lm_head.",),
    defaults={
        "rms_norm_eps": 1e-6, "sliding_window": 512, "query_pre_attn_scalar": 256, "head_dim": 256, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "num_key_value_heads": 1, "max_position_embeddings": 2048,
    },
    known={"use_bidirectional_attention": (True,), "attention_bias": (False,), "final_logit_softcapping": (),
           "attn_logit_softcapping": (), "cache_implementation": ()},
    answers=_both_ways,
)  # fmt: skip
