"""BERT-type encoders (Devlin et al., 2018): every token sees every other, nothing is cached."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.families.family import read_labels
from sapwood_worker.model.families.known_keys import CONFIG, refusal
from sapwood_worker.model.families.values import check_count
from sapwood_worker.records.model_info import Labels

_UNREAD_SETTINGS = {
    "hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (), "model_type": (), "pooler_fc_size": (),
    "pooler_num_attention_heads": (), "pooler_num_fc_layers": (), "pooler_size_per_head": (), "pooler_type": (),
    "directionality": (), "tie_word_embeddings": (),
    "gradient_checkpointing": (), "num_labels": (), "embedding_size": (),
}  # fmt: skip
_CLASSIFIER = "BertForSequenceClassification"
ARCHITECTURES = ("BertModel", "BertForMaskedLM", _CLASSIFIER)
"""The second one's head serves only training and is left out. Models with other heads that make the answer are not served."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The shape of a model; the names are those of ``config.json``.

    ``labels``: what its head tells. None: it has none. ``separator``: the token that ends each text of a pair.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    labels: Labels | None = None
    separator: int = 102


def is_bert(path: Path) -> bool:
    """Whether a Hugging Face directory holds such a model.

    Raises:
        ConfigError: It holds one with a head that is not served.
    """
    file = path / "config.json"
    names = (read_json_object(file).get("architectures") or [""]) if file.is_file() else [""]
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
    values = {"type_vocab_size": 2, "layer_norm_eps": 1e-12} | read_json_object(file)
    if values.get("hidden_act", "gelu") != "gelu" or values.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(f"{file}: of BERT only gelu and absolute positions are supported")
    shape = [field.name for field in fields(BertConfig) if field.default is MISSING]
    refused = CONFIG.refused({name: value for name, value in values.items() if name not in shape}, _UNREAD_SETTINGS)
    if refused:
        raise ConfigError(refusal(str(file), refused))
    try:
        for name in shape:
            if name != "layer_norm_eps":
                check_count(name, values[name], 1)
        config = BertConfig(**{name: values[name] for name in shape})
        if (values.get("architectures") or [""])[0] != _CLASSIFIER:
            return config
        return replace(config, labels=read_labels(values), separator=_separator(path))
    except KeyError as error:
        raise ConfigError(f"{file}: {error.args[0]} is missing") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: {error}") from error


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

    def forward(self, token_ids: Tensor, mask: Tensor, second: Tensor | None = None) -> Tensor:
        """The hidden states of a padded batch.

        Args:
            token_ids: int64 [B, T].
            mask: bool [B, T], true where there is a token.
            second: bool [B, T], true where the token is of the second text of a pair. None: there are no pairs.

        Returns:
            [B, T, hidden_size].
        """
        table = self.embeddings
        kinds = torch.zeros_like(token_ids) if second is None else second.long()
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden: Tensor = table["word_embeddings"](token_ids) + table["position_embeddings"](positions)
        hidden = table["LayerNorm"](hidden + table["token_type_embeddings"](kinds))
        for layer in self.encoder["layer"].children():
            hidden = layer(hidden, mask[:, None, None])
        return hidden


class BertClassifier(nn.Module):
    """The encoder with a head over its first token: a logit for each label.

    Args:
        config: The model's, which has labels.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        assert config.labels is not None
        size = config.hidden_size
        self._separator, self._kinds = config.separator, config.type_vocab_size
        self.bert = BertModel(config)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(size, size)})
        self.classifier = nn.Linear(size, len(config.labels.names))

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """The logits of a padded batch, of texts and of pairs. What follows the first separator is a pair's second text.

        Args:
            token_ids: int64 [B, T].
            mask: bool [B, T], true where there is a token.

        Returns:
            [B, labels].
        """
        ends = (token_ids == self._separator).long()
        second = (ends.cumsum(1) - ends > 0) & mask if self._kinds > 1 else None
        first = self.bert(token_ids, mask, second)[:, 0]
        result: Tensor = self.classifier(torch.tanh(self.pooler["dense"](first)))
        return result


def _separator(path: Path) -> int:
    """The token that ends each text: ``[SEP]``, or what the tokenizer's files call it."""
    settings = read_json_object(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    named = settings.get("sep_token", "[SEP]")
    text = named.get("content") if isinstance(named, dict) else named
    added = read_json_object(path / "tokenizer.json").get("added_tokens", ())
    found = [token["id"] for token in added if token.get("content") == text]
    if not found:
        raise ValueError(f"{path / 'tokenizer.json'} has no token {text} to end texts with")
    return int(found[0])


def _dense_norm(inner: int, size: int, eps: float) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inner, size), "LayerNorm": nn.LayerNorm(size, eps)})
