"""BERT-type encoders (Devlin et al., 2018): every token sees every other, nothing is cached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sapwood_common.errors import ConfigError
from sapwood_worker.model.families.hf_values import read_json

ARCHITECTURES = ("BertModel", "BertForMaskedLM")
"""The second one's head serves only training and is left out. Models whose head makes the answer are not served."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The shape of a model; the names are those of ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float


def is_bert(path: Path) -> bool:
    """Whether a Hugging Face directory holds such a model.

    Raises:
        ConfigError: It holds one with a head that is not served.
    """
    file = path / "config.json"
    names = (read_json(file).get("architectures") or [""]) if file.is_file() else [""]
    if str(names[0]).startswith("Bert") and names[0] not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file}: architecture {names[0]} has a head that is not supported (supported: {served})")
    return names[0] in ARCHITECTURES


def read_bert_config(path: Path) -> BertConfig:
    """Reads ``config.json``.

    Raises:
        ConfigError: A value is missing or not supported; names the file.
    """
    file = path / "config.json"
    values = {"type_vocab_size": 2, "layer_norm_eps": 1e-12} | read_json(file)
    if values.get("hidden_act", "gelu") != "gelu" or values.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(f"{file}: of BERT only gelu and absolute positions are supported")
    try:
        return BertConfig(**{name: values[name] for name in BertConfig.__slots__})
    except KeyError as error:
        raise ConfigError(f"{file}: {error.args[0]} is missing") from error


class BertLayer(nn.Module):
    """Attention and feed-forward, each with a norm after the sum. Parameters are named as in Hugging Face checkpoints."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self._heads = config.num_attention_heads
        projections = {name: nn.Linear(size, size) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(projections), "output": _dense_norm(size, size, eps)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(size, inner)})
        self.output = _dense_norm(inner, size, eps)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[B, T, hidden_size] -> the same shape; ``mask``, bool [B, 1, 1, T], is true where there is a token."""
        batch, length, size = hidden.shape
        projections, output = self.attention["self"], self.attention["output"]
        assert isinstance(projections, nn.ModuleDict) and isinstance(output, nn.ModuleDict)
        query, key, value = (
            projections[name](hidden).view(batch, length, self._heads, size // self._heads).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, size)
        hidden = output["LayerNorm"](output["dense"](mixed) + hidden)
        inner = F.gelu(self.intermediate["dense"](hidden))
        result: Tensor = self.output["LayerNorm"](self.output["dense"](inner) + hidden)
        return result


class BertModel(nn.Module):
    """The encoder without its pooler."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, size),
                "position_embeddings": nn.Embedding(config.max_position_embeddings, size),
                "token_type_embeddings": nn.Embedding(config.type_vocab_size, size),
                "LayerNorm": nn.LayerNorm(size, config.layer_norm_eps),
            }
        )
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))}
        )

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """The hidden states of a padded batch.

        Args:
            token_ids: int64 [B, T].
            mask: bool [B, T], true where there is a token.

        Returns:
            [B, T, hidden_size].
        """
        table = self.embeddings
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden: Tensor = table["word_embeddings"](token_ids) + table["position_embeddings"](positions)
        hidden = table["LayerNorm"](hidden + table["token_type_embeddings"](torch.zeros_like(token_ids)))
        for layer in self.encoder["layer"].children():
            hidden = layer(hidden, mask[:, None, None])
        return hidden


def load_bert(path: Path, dtype: torch.dtype, device: torch.device, *, dummy: bool) -> tuple[BertModel, BertConfig]:
    """Loads a Hugging Face directory; ``dummy`` leaves the weights random.

    Raises:
        ConfigError: It cannot be read; names the file and what.
    """
    config = read_bert_config(path)
    model = BertModel(config)
    if not dummy:
        file = path / "model.safetensors"
        try:
            tensors = load_file(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
        wanted = model.state_dict()
        found = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
        missing = sorted(wanted.keys() - found.keys())
        if missing:
            raise ConfigError(f"{file}: has no {missing[0]}")
        wrong = [name for name in wanted if wanted[name].shape != found[name].shape]
        if wrong:
            raise ConfigError(
                f"{file}: {wrong[0]} is {list(found[wrong[0]].shape)}, not {list(wanted[wrong[0]].shape)}"
            )
        model.load_state_dict({name: found[name] for name in wanted})
    return model.to(device, dtype).eval().requires_grad_(False), config


def _dense_norm(inner: int, size: int, eps: float) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inner, size), "LayerNorm": nn.LayerNorm(size, eps)})
