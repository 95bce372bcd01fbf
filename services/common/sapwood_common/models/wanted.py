"""Which files of a model that lies elsewhere are fetched: what workers and tokenizers read, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DESCRIPTION = (
    *("config.json", "generation_config.json", INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "spiece.model", "sentencepiece*.model", "tiktoken.model", "*.tiktoken", "tekken.json"),
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "*_Pooling/config.json"),
)
"""Patterns of all of them but the weights."""


def description_among(names: Iterable[str]) -> list[str]:
    """The names of files without weights."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in DESCRIPTION)]


def is_shard_name(name: str) -> bool:
    """Whether an index may name this as a file with weights: one of its folder, or below, and nowhere else."""
    return (
        name.endswith(".safetensors")
        and not any(part in ("", ".", "..") for part in name.split("/"))
        and not any(character in name for character in "\\\0\n\r")
    )


def weights_named_by(index: str | None) -> Sequence[str]:
    """The files with the weights.

    Args:
        index: The text of ``model.safetensors.index.json``; None: there is none.

    Raises:
        ValueError: The text is no such index.
    """
    if index is None:
        return [SINGLE]
    try:
        names = sorted(set(json.loads(index)["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError(names)
        if outside := [name for name in names if not is_shard_name(name)]:
            raise ValueError(f"{outside[0]!r:.100} is no name of a .safetensors file next to the index")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX}: cannot be read: {error!r}") from error
    return names
