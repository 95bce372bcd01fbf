"""Which files of a model that lies elsewhere are fetched: what workers and tokenizers read, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DESCRIPTION = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", INDEX, TORCH_INDEX),
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
        name.endswith((".safetensors", ".bin"))
        and not any(part in ("", ".", "..") for part in name.split("/"))
        and not any(character in name for character in "\\\0\n\r")
    )


def weights_among(names: Collection[str], read: Callable[[str], str]) -> Sequence[str]:
    """The files with the weights: safetensors if there are any, else torch's own.

    Args:
        names: The files that there are.
        read: Gives the text of one of them.

    Raises:
        ValueError: The index is none.
    """
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        if index in names:
            return _named_by(index, read(index))
        if single in names:
            return [single]
    return [SINGLE]


def _named_by(index: str, text: str) -> Sequence[str]:
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError(names)
        if outside := [name for name in names if not is_shard_name(name)]:
            raise ValueError(f"{outside[0]!r:.100} is no name of a file with weights next to the index")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: cannot be read: {error!r}") from error
    return names
