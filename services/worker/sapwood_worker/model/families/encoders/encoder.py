"""What all families of encoders share: the facts that a worker needs of one, how its files are read, and windows of attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.families.family import read_labels
from sapwood_worker.model.families.known_keys import CONFIG, Allowed, refusal
from sapwood_worker.model.families.values import Reads, Settings, check_count
from sapwood_worker.records.model_info import Labels

CLASSIFIES = "ForSequenceClassification"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The shape of an encoder; the names are those of ``config.json``.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the hidden states.
        intermediate_size: Width inside the MLP.
        num_hidden_layers: Layers.
        num_attention_heads: Heads of queries.
        max_position_embeddings: The longest text in tokens.
        labels: What its head tells. None: it has none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    labels: Labels | None = None


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders.

    Attributes:
        name: Its name in ``GetModelInfo``.
        architectures: Its names in ``config.json``. A head for masked tokens serves training alone and is left out.
        read: The configuration that settings give; raises KeyError or ValueError. The directory holds the tokenizer's files.
        build: The model: int64 token ids [B, T] and a bool mask [B, T], true where there is a token, -> [B, T, hidden_size], or
            [B, labels] if it has labels.
        renamed: Parts of stored tensors' names, and what ours have in their place, in this order.
        unread: How names of tensors begin that serve training, or are no weights.
        defaults: Settings for those that a file leaves out.
        known: Settings that a file may have and nothing reads, with the values that they may have.
        answers: Whether a configuration is one of this family; None: its architecture tells.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Settings, Path], EncoderConfig]
    build: Callable[[Any], nn.Module]
    renamed: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, Allowed] = field(default_factory=dict)
    answers: Callable[[Mapping[str, Any]], bool] | None = None

    def has_other_head(self, architecture: str) -> bool:
        """Whether an architecture that is not served has the layers of one that is, and another head."""
        layers = tuple(re.sub(f"(Model|ForMaskedLM|{CLASSIFIES})$", "", name) for name in self.architectures)
        return architecture not in self.architectures and architecture.startswith(layers)

    def named(self, stored: str) -> str:
        """Our name of a stored tensor."""
        for theirs, ours in self.renamed.items():
            if theirs.startswith("^"):
                stored = ours + stored.removeprefix(theirs[1:]) if stored.startswith(theirs[1:]) else stored
            else:
                stored = stored.replace(theirs, ours)
        return stored

    def config(self, path: Path) -> EncoderConfig:
        """Reads ``config.json`` of a directory.

        Raises:
            ConfigError: A value is missing, not supported, or read by nothing; names the file and the setting.
        """
        file = path / "config.json"
        given = Settings(read_json_object(file), Reads())
        values = given.over(self.defaults)
        try:
            config = self.read(values, path)
            if str((values.get("architectures") or [""])[0]).endswith(CLASSIFIES):
                config = replace(config, labels=read_labels(values))
        except KeyError as error:
            raise ConfigError(f"{file}: {error.args[0]} is missing") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file}: {error}") from error
        if refused := CONFIG.refused(given.unread(), {**_KNOWN, **self.known}):
            raise ConfigError(refusal(str(file), refused))
        return config


_KNOWN: Mapping[str, Allowed] = {
    "is_decoder": (), "model_type": (), "tie_word_embeddings": (), "gradient_checkpointing": (), "num_labels": (),
    "output_past": (),
}  # fmt: skip
"""Of all families."""


def shape(values: Settings, *, whole: bool = True, **theirs: str) -> dict[str, Any]:
    """The numbers of an :class:`EncoderConfig`.

    Args:
        values: The settings.
        whole: Whether the heads together are as wide as the model.
        theirs: Our name of a number -> the family's, where it has another.

    Raises:
        KeyError: One is missing.
        ValueError: One is no whole number above 0; names it.
    """
    names = {name: theirs.get(name, name) for name in EncoderConfig.__dataclass_fields__ if name != "labels"}
    found: dict[str, Any] = {}
    for ours, name in names.items():
        check_count(name, values[name], 1)
        found[ours] = int(values[name])
    if whole and found["hidden_size"] % found["num_attention_heads"]:
        raise ValueError(
            f"{names['hidden_size']} {found['hidden_size']} is no multiple of {names['num_attention_heads']} "
            f"{found['num_attention_heads']}"
        )
    return found


def within(length: int, reach: int | None, device: torch.device) -> Tensor | None:
    """bool [T, T]: the tokens that see each other, at most ``reach`` positions apart; None: all do."""
    if reach is None or length <= reach + 1:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= reach


class Rotation(nn.Module):
    """Turns heads by their position, halves of a head together. Source: Su et al., 2021.

    Args:
        head_dim: Elements of a head.
        theta: The base of its frequencies.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self._exponents, self._theta = [i / head_dim for i in range(0, head_dim, 2)], theta

    def forward(self, heads: Tensor) -> Tensor:
        """[B, H, T, head_dim] -> the same shape, computed in float32."""
        exponents = torch.tensor(self._exponents, dtype=torch.float32, device=heads.device)
        angles = (
            torch.arange(heads.shape[2], dtype=torch.float32, device=heads.device)[:, None] * self._theta**-exponents
        )
        cos, sin = angles.cos(), angles.sin()
        one, other = heads.float().chunk(2, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(heads.dtype)
