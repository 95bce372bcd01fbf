"""BERT-type encoders (Devlin et al., 2018): attention and an MLP, each with a norm after the sum; a table of positions.

RoBERTa, XLM-RoBERTa (BGE-M3, multilingual E5), CamemBERT and MPNet have the same layers. Their positions begin after the padding
token's id, and their head that classifies has other names. DistilBERT has no kinds of tokens. MPNet (Song et al., 2020) adds a
number by distance to the products of queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.families.encoders.encoder import CLASSIFIES, EncoderConfig, EncoderFamily, shape
from sapwood_worker.model.families.values import Settings, check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderConfig):
    """The shape of a model.

    Attributes:
        type_vocab_size: Kinds of tokens; 0: all are of one kind.
        layer_norm_eps: Added to the variance in each norm.
        separator: The token that ends each text of a pair.
        first_position: The row of the table of positions that a text's first token has. ``max_position_embeddings`` of a file
            counts those before it.
        buckets: Distances that attention tells apart; 0: none.
        tanh: Whether the head that classifies has tanh, else ReLU.
    """

    type_vocab_size: int
    layer_norm_eps: float
    separator: int = 102
    first_position: int = 0
    buckets: int = 0
    tanh: bool = True


class BertLayer(nn.Module):
    """Attention and feed-forward, each with a norm after the sum. Parameters are named as in BERT's checkpoints."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self._heads = config.num_attention_heads
        projections = {name: nn.Linear(size, size) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(projections), "output": _dense_norm(size, size, eps)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(size, inner)})
        self.output = _dense_norm(inner, size, eps)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[B, T, hidden_size] -> the same shape.

        ``mask``, bool [B, 1, 1, T], is true where there is a token; or it is added to products, [B, H, T, T].
        """
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
        self._first = config.first_position
        tables = {
            "word_embeddings": nn.Embedding(config.vocab_size, size),
            "position_embeddings": nn.Embedding(config.first_position + config.max_position_embeddings, size),
            "LayerNorm": nn.LayerNorm(size, config.layer_norm_eps),
        }
        if config.type_vocab_size:
            tables["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, size)
        self.embeddings = nn.ModuleDict(tables)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))}
        )
        if config.buckets:
            self.encoder["relative_attention_bias"] = nn.Embedding(config.buckets, config.num_attention_heads)

    def forward(self, token_ids: Tensor, mask: Tensor, second: Tensor | None = None) -> Tensor:
        """The hidden states of a padded batch.

        Args:
            token_ids: int64 [B, T].
            mask: bool [B, T], true where there is a token.
            second: bool [B, T], true where the token is of the second text of a pair. None: there are no pairs.

        Returns:
            [B, T, hidden_size].
        """
        table, length = self.embeddings, token_ids.shape[1]
        positions = torch.arange(self._first, self._first + length, device=token_ids.device)
        hidden: Tensor = table["word_embeddings"](token_ids) + table["position_embeddings"](positions)
        if "token_type_embeddings" in table:
            kinds = torch.zeros_like(token_ids) if second is None else second.long()
            hidden = hidden + table["token_type_embeddings"](kinds)
        hidden = table["LayerNorm"](hidden)
        seen = mask[:, None, None]
        if "relative_attention_bias" in self.encoder:
            bias = self._bias(length).to(hidden.dtype)
            seen = bias.masked_fill(~seen, float("-inf"))
        for layer in self.encoder["layer"].children():
            hidden = layer(hidden, seen)
        return hidden

    def _bias(self, length: int) -> Tensor:
        """[1, H, T, T]: what is added to products, by distance: exactly for near tokens, by the logarithm for others."""
        table = self.encoder["relative_attention_bias"]
        assert isinstance(table, nn.Embedding)
        places = torch.arange(length, device=table.weight.device)
        apart = places[:, None] - places
        half = table.num_embeddings // 2
        exact, far = half // 2, apart.abs()
        scaled = torch.log(far.clamp(min=1).float() / exact) / math.log(_FARTHEST / exact) * (half - exact)
        bucket = torch.where(far < exact, far, (exact + scaled.long()).clamp(max=half - 1))
        found: Tensor = table(bucket + (apart < 0) * half)
        return found.permute(2, 0, 1)[None]


_FARTHEST = 128
"""Tokens farther apart are all alike to MPNet."""


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
        self._activation = torch.tanh if config.tanh else F.relu
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
        result: Tensor = self.classifier(self._activation(self.pooler["dense"](first)))
        return result


def _build(config: BertConfig) -> nn.Module:
    return BertModel(config) if config.labels is None else BertClassifier(config)


def _dense_norm(inner: int, size: int, eps: float) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inner, size), "LayerNorm": nn.LayerNorm(size, eps)})


# What their files say.


def _bert(values: Settings, path: Path) -> BertConfig:
    _plain(values)
    check_count("type_vocab_size", values["type_vocab_size"], 1)
    kinds = int(values["type_vocab_size"])
    # Of those with one kind of token none says which text it is of.
    tells = kinds > 1 and str((values.get("architectures") or [""])[0]).endswith(CLASSIFIES)
    config = BertConfig(**shape(values), type_vocab_size=kinds, layer_norm_eps=float(values["layer_norm_eps"]))
    return replace(config, separator=_separator(path)) if tells else config


def _padded(values: Settings, path: Path) -> BertConfig:
    """Those whose positions are counted from the padding token's id on."""
    _plain(values)
    kinds = values.get("type_vocab_size", 0)
    check_count("type_vocab_size", kinds, 0)
    check_count("pad_token_id", first := values.get("pad_token_id", 1) + 1, 1)
    numbers = shape(values)
    longest = numbers["max_position_embeddings"] - first
    check_count("max_position_embeddings less the positions before the first", longest, 1)
    buckets = int(values.get("relative_attention_num_buckets", 0))
    if buckets not in (0, _BUCKETS):
        raise ValueError(f"relative_attention_num_buckets {buckets} is not supported ({_BUCKETS} is)")
    return BertConfig(
        **{**numbers, "max_position_embeddings": longest},
        type_vocab_size=int(kinds),
        layer_norm_eps=float(values["layer_norm_eps"]),
        first_position=first,
        buckets=buckets,
    )


_BUCKETS = 32
"""Which transformers takes for MPNet, whatever the file says."""


def _distilled(values: Settings, path: Path) -> BertConfig:
    if values.get("activation", "gelu") != "gelu":
        raise ValueError(f"activation {values['activation']!r:.60} is not supported (gelu is)")
    numbers = shape(
        values,
        hidden_size="dim",
        intermediate_size="hidden_dim",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
    )
    return BertConfig(**numbers, type_vocab_size=0, layer_norm_eps=1e-12, tanh=False)


def _plain(values: Settings) -> None:
    if values.get("hidden_act", "gelu") != "gelu" or values.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError("of BERT only gelu and absolute positions are supported")


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


_DEFAULTS = {"type_vocab_size": 2, "layer_norm_eps": 1e-12}
_KNOWN: dict[str, tuple[object, ...]] = {
    "pooler_fc_size": (), "pooler_num_attention_heads": (), "pooler_num_fc_layers": (), "pooler_size_per_head": (),
    "pooler_type": (), "directionality": (), "embedding_size": (),
}  # fmt: skip
_UNREAD = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "classifier.", "dropout.")
_RENAMED = {
    "^bert.": "", "^roberta.": "", "LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias",
    "classifier.dense.": "pooler.dense.", "classifier.out_proj.": "classifier.",
}  # fmt: skip
"""Files of 2019 name the parts of a LayerNorm otherwise, RoBERTa's those of a head that classifies."""

BERT = EncoderFamily(
    name="bert",
    architectures=(
        "BertModel",
        "BertForMaskedLM",
        "BertForSequenceClassification",
    ),
    read=_bert,
    build=_build,
    renamed=_RENAMED,
    unread=_UNREAD,
    defaults=_DEFAULTS,
    known=_KNOWN,
)
ROBERTA = EncoderFamily(
    name="roberta",
    architectures=(
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "CamembertModel",
        "CamembertForMaskedLM",
        "CamembertForSequenceClassification",
    ),
    read=_padded,
    build=_build,
    renamed=_RENAMED,
    unread=_UNREAD,
    defaults=_DEFAULTS,
    known=_KNOWN,
)
MPNET = EncoderFamily(
    name="mpnet",
    architectures=("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification",),
    read=_padded,
    build=_build,
    renamed={
        **_RENAMED, "^mpnet.": "", "attention.attn.q.": "attention.self.query.", "attention.attn.k.": "attention.self.key.",
        "attention.attn.v.": "attention.self.value.", "attention.attn.o.": "attention.output.dense.",
        "attention.LayerNorm.": "attention.output.LayerNorm.",
    },
    unread=_UNREAD,
    defaults={"layer_norm_eps": 1e-12, "relative_attention_num_buckets": _BUCKETS, "type_vocab_size": 0},
    known=_KNOWN,
)  # fmt: skip
DISTILBERT = EncoderFamily(
    name="distilbert",
    architectures=("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification",),
    read=_distilled,
    build=_build,
    renamed={
        "^distilbert.": "", "^transformer.": "encoder.", "attention.q_lin.": "attention.self.query.",
        "attention.k_lin.": "attention.self.key.", "attention.v_lin.": "attention.self.value.",
        "attention.out_lin.": "attention.output.dense.", "sa_layer_norm.": "attention.output.LayerNorm.",
        "ffn.lin1.": "intermediate.dense.", "ffn.lin2.": "output.dense.", "output_layer_norm.": "output.LayerNorm.",
        "pre_classifier.": "pooler.dense.",
    },
    unread=(*_UNREAD, "vocab_"),
    known={"sinusoidal_pos_embds": (), "qa_dropout": (), "seq_classif_dropout": (), "dropout": ()},
)  # fmt: skip
