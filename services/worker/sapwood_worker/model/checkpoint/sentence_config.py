"""How a model's files want sentences embedded, as sentence-transformers writes them down.

``modules.json`` lists what is done one after the other: Transformer, Pooling, Normalize. ``sentence_bert_config.json`` beside it
limits the input, special tokens included; what is longer is cut, not refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError

_POOLINGS = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How to embed a sentence.

    Attributes:
        pooling: ``mean``, ``last`` or ``cls``.
        normalizes: Whether vectors have length 1.
        max_tokens: Longer inputs are cut to so many tokens; 0: none is cut.
        special_ids: Special tokens; those at an input's end stay when it is cut.
        shortened: Lengths to which vectors may be cut, for which the model was trained; empty: any; None: they may not be cut.
    """

    pooling: str
    normalizes: bool = True
    max_tokens: int = 0
    special_ids: tuple[int, ...] = ()
    shortened: tuple[int, ...] | None = None


def read_sentence_config(path: Path, pooling: str, most: int) -> SentenceConfig:
    """Reads the files.

    Args:
        path: The model's directory, or a file, which says nothing.
        pooling: The pooling if the files do not say.
        most: The most tokens that the model takes.

    Raises:
        ConfigError: They ask for what is not supported, or cannot be read.
    """
    modules = _read(path / "modules.json")
    shortened = _shortened(path / "config.json")
    if modules is None:
        return SentenceConfig(pooling, shortened=shortened)
    normalizes = False
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(path / module["path"] / "config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{path / 'modules.json'}: module {kind} is not supported (Transformer, Pooling, Normalize are)"
            )
    limit = (_read(path / "sentence_bert_config.json") or {}).get("max_seq_length")
    if limit is None:
        limit = (_read(path / "tokenizer_config.json") or {}).get("model_max_length", most)
    added = (_read(path / "tokenizer.json") or {}).get("added_tokens", ())
    special = tuple(token["id"] for token in added if token.get("special"))
    return SentenceConfig(pooling, normalizes, int(min(limit, most)), special, shortened)


def _shortened(file: Path) -> tuple[int, ...] | None:
    """The lengths that ``config.json`` allows, as vLLM reads it: ``matryoshka_dimensions``, or any if ``is_matryoshka``."""
    values = _read(file) or {}
    dimensions = values.get("matryoshka_dimensions")
    if dimensions is None:
        return () if values.get("is_matryoshka") is True else None
    if not isinstance(dimensions, list) or not all(isinstance(each, int) and each > 0 for each in dimensions):
        raise ConfigError(f"{file}: matryoshka_dimensions must be a list of numbers over 0, got {dimensions!r}")
    return tuple(dimensions)


def _pooling(file: Path) -> str:
    values = _read(file) or {}
    mode = values.get("pooling_mode") or [name for key, name in _LEGACY.items() if values.get(key)] or "mean"
    if isinstance(mode, list) and len(mode) == 1:
        [mode] = mode
    if not isinstance(mode, str) or mode not in _POOLINGS:
        raise ConfigError(f"{file}: pooling {mode!r} is not supported ({', '.join(_POOLINGS)} are)")
    return _POOLINGS[mode]


def _read(file: Path) -> Any:
    """The content of a JSON file; None if there is no such file."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
