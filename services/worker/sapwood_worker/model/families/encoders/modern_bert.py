"""ModernBERT (Warner et al., 2024): norms before attention and a gated MLP, rotary positions, windows in two of three layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_worker.model.families.encoders.encoder import (
    EncoderConfig,
    EncoderFamily,
    Rotation,
    shape,
    within,
)
from sapwood_worker.model.families.values import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    """The shape of a model.

    Attributes:
        norm_eps: Added to the variance in each norm.
        norm_bias: Whether norms have biases.
        attention_bias: Whether attention's projections have biases.
        mlp_bias: Whether those of MLPs have.
        reaches: For each layer how many positions a token sees to either side; None: all.
        thetas: The base of each layer's rotary frequencies.
        pooling: The tokens that its head reads: the first, or the mean of all.
        head_bias: Whether the head's first projection has a bias.
    """

    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    reaches: tuple[int | None, ...]
    thetas: tuple[float, ...]
    pooling: Literal["cls", "mean"]
    head_bias: bool


class ModernBertLayer(nn.Module):
    """Attention and MLP, each added to what a norm of its own reads. Parameters are named as in checkpoints."""

    def __init__(self, config: ModernBertConfig, index: int) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self._heads, self.reach = config.num_attention_heads, config.reaches[index]
        self.attn_norm = nn.Identity() if index == 0 else _norm(config)
        self.attn = nn.ModuleDict(
            {
                "Wqkv": nn.Linear(size, 3 * size, bias=config.attention_bias),
                "Wo": nn.Linear(size, size, bias=config.attention_bias),
            }
        )
        self.mlp_norm = _norm(config)
        self.mlp = nn.ModuleDict(
            {
                "Wi": nn.Linear(size, 2 * inner, bias=config.mlp_bias),
                "Wo": nn.Linear(inner, size, bias=config.mlp_bias),
            }
        )
        self.rotation = Rotation(size // self._heads, config.thetas[index])

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[B, T, hidden_size] -> the same shape; ``mask``, bool [B, 1, T or 1, T], is true where a token is seen."""
        batch, length, size = hidden.shape
        heads = self.attn["Wqkv"](self.attn_norm(hidden)).view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        query, key = self.rotation(heads[0]), self.rotation(heads[1])
        mixed = F.scaled_dot_product_attention(query, key, heads[2], attn_mask=mask)
        hidden = hidden + self.attn["Wo"](mixed.transpose(1, 2).reshape(batch, length, size))
        one, gate = self.mlp["Wi"](self.mlp_norm(hidden)).chunk(2, -1)
        result: Tensor = hidden + self.mlp["Wo"](F.gelu(one) * gate)
        return result


class ModernBertModel(nn.Module):
    """The encoder."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {"tok_embeddings": nn.Embedding(config.vocab_size, config.hidden_size), "norm": _norm(config)}
        )
        self.layers = nn.ModuleList(ModernBertLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = _norm(config)

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """int64 [B, T] and a bool mask [B, T], true where there is a token -> [B, T, hidden_size]."""
        hidden: Tensor = self.embeddings["norm"](self.embeddings["tok_embeddings"](token_ids))
        every = mask[:, None, None]
        seen: dict[int | None, Tensor] = {}
        for layer in self.layers:
            assert isinstance(layer, ModernBertLayer)
            if layer.reach not in seen:
                near = within(token_ids.shape[1], layer.reach, token_ids.device)
                # A padded row sees itself: a row that sees nothing gives no number.
                seen[layer.reach] = every if near is None else every & near | _itself(near)
            hidden = layer(hidden, seen[layer.reach])
        result: Tensor = self.final_norm(hidden)
        return result


class ModernBertClassifier(nn.Module):
    """The encoder with a head over its first token, or the mean of all: a logit for each label."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        assert config.labels is not None
        size = config.hidden_size
        self._mean = config.pooling == "mean"
        self.model = ModernBertModel(config)
        self.head = nn.ModuleDict({"dense": nn.Linear(size, size, bias=config.head_bias), "norm": _norm(config)})
        self.classifier = nn.Linear(size, len(config.labels.names))

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """int64 [B, T] and a bool mask [B, T] -> [B, labels]."""
        hidden = self.model(token_ids, mask)
        pooled = hidden[:, 0]
        if self._mean:
            weights = mask[..., None].to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        result: Tensor = self.classifier(self.head["norm"](F.gelu(self.head["dense"](pooled))))
        return result


def _itself(near: Tensor) -> Tensor:
    """bool [T, T]: each token alone."""
    return near.new_zeros(near.shape).fill_diagonal_(True)


def _norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


def _read(values: Settings, path: Path) -> ModernBertConfig:
    for name in ("hidden_activation", "classifier_activation"):
        if values.get(name, "gelu") != "gelu":
            raise ValueError(f"{name} {values[name]!r:.60} is not supported (gelu is)")
    numbers = shape(values)
    layers = numbers["num_hidden_layers"]
    every = int(values.get("global_attn_every_n_layers", 3))
    kinds = values.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has to say sliding_attention or full_attention for each of {layers} layers")
    ropes = values.get("rope_parameters") or {}
    bases = {
        "full_attention": float((ropes.get("full_attention") or {}).get("rope_theta", values["global_rope_theta"])),
        "sliding_attention": float(
            (ropes.get("sliding_attention") or {}).get("rope_theta", values["local_rope_theta"])
        ),
    }
    for kind in set(kinds):
        if (rope := (ropes.get(kind) or {}).get("rope_type", "default")) != "default":
            raise ValueError(
                f"rope_parameters.{kind}: rotary embedding type {rope!r:.60} is not supported (default is)"
            )
    pooling = values["classifier_pooling"]
    if pooling not in ("cls", "mean"):
        raise ValueError(f"classifier_pooling {pooling!r:.60} is not supported (cls and mean are)")
    reach = int(values["local_attention"]) // 2
    return ModernBertConfig(
        **numbers,
        norm_eps=float(values["norm_eps"]),
        norm_bias=bool(values["norm_bias"]),
        attention_bias=bool(values["attention_bias"]),
        mlp_bias=bool(values["mlp_bias"]),
        reaches=tuple(reach if kind == "sliding_attention" else None for kind in kinds),
        thetas=tuple(bases[kind] for kind in kinds),
        pooling="mean" if pooling == "mean" else "cls",
        head_bias=bool(values["classifier_bias"]),
    )


MODERN_BERT = EncoderFamily(
    name="modernbert",
    architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification",),
    read=_read,
    build=lambda config: ModernBertModel(config) if config.labels is None else ModernBertClassifier(config),
    renamed={"^model.": ""},
    unread=("head.", "decoder.", "classifier.", "drop."),
    defaults={
        "norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False, "local_attention": 128,
        "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "classifier_pooling": "cls", "classifier_bias": False,
        "max_position_embeddings": 8192,
    },
    known={
        "decoder_bias": (), "deterministic_flash_attn": (), "embedding_dropout": (), "mlp_dropout": (), "classifier_dropout": (),
        "sparse_prediction": (), "sparse_pred_ignore_index": (), "initializer_cutoff_factor": (), "layer_norm_eps": (),
        "position_embedding_type": (), "repad_logits_with_grad": (), "reference_compile": (), "cls_token_id": (),
        "sep_token_id": (),
    },
)  # fmt: skip
