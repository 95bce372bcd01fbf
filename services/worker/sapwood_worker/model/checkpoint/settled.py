"""The facts about a model that its tensors show and its ``config.json`` omits or contradicts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from sapwood_common.errors import ConfigError
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource, checkpoint_files
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.weight_slot import StoredTensor

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DRAFTING = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Tensors that a layer has which drafts tokens, and no other."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_FEWEST_BITS = 1


def settle(config: ModelConfig, source: SafetensorsSource, path: Path) -> tuple[ModelConfig, bool]:
    """The configuration with what the tensors say: whether there is a head of its own, and layers that draft.

    Args:
        config: Of ``config.json``.
        source: All tensors; those that are not read are dropped from it.
        path: The directory.

    Returns:
        The configuration, and whether there is no head at all: a model that makes embeddings.

    Raises:
        ConfigError: There are layers that the configuration does not have, or sizes of another model.
    """
    names = source.tensors()
    config = replace(config, draft_layers=_draft_layers(config, names, source, path))
    drafts = range(config.num_layers, config.num_layers + config.draft_layers)
    source.drop(*(f"model.layers.{index}." for index in drafts))
    config, headless = _head(config, source, names, path)
    check_sizes(config, source.tensors(), path, sum(file.stat().st_size for file in checkpoint_files(path)))
    return config, headless


def _head(
    config: ModelConfig, source: SafetensorsSource, names: Mapping[str, StoredTensor], path: Path
) -> tuple[ModelConfig, bool]:
    own = [name for name in names if name.startswith("lm_head.") and not name.endswith(".bias")]
    if config.labels is not None:
        return config, False
    if not config.tie_word_embeddings:
        if own or _EMBEDDING not in names:
            return config, False
        logger.info("%s: there is no lm_head.weight: the model makes embeddings alone", path)
        return replace(config, tie_word_embeddings=True), True
    if not own:
        return config, False
    if own == [_HEAD] and _EMBEDDING in names and names[_HEAD].shape == names[_EMBEDDING].shape:
        head, table = source.read(_HEAD), source.read(_EMBEDDING)
        if torch.equal(head, table) if head.dtype == table.dtype else torch.equal(head.float(), table.float()):
            source.drop(_HEAD)
            return config, False
    logger.warning(
        "%s: tie_word_embeddings of config.json says that the output head is the embedding, but %s is another: it is used",
        path,
        own[0],
    )
    return replace(config, tie_word_embeddings=False), False


def _draft_layers(config: ModelConfig, names: Mapping[str, StoredTensor], source: SafetensorsSource, path: Path) -> int:
    """Layers after the model's own that draft; ``num_nextn_predict_layers`` may be missing."""
    first = config.num_layers + config.draft_layers
    inside: dict[int, list[str]] = {}
    for name in names:
        if (found := _LAYER.fullmatch(name)) and int(found[1]) >= first:
            inside.setdefault(int(found[1]), []).append(found[2])
    others = [index for index, parts in inside.items() if not set(_DRAFTING) <= set(parts)]
    if others:
        index = min(others)
        name = f"model.layers.{index}.{min(inside[index])}"
        raise ConfigError(
            f"{source.where(name)}: tensor {source.stored_name(name)} is unexpected: num_hidden_layers of config.json is "
            f"{config.num_layers}, and the layer has not the tensors of one that drafts tokens ({', '.join(_DRAFTING)})"
        )
    if inside:
        logger.info("%s: num_nextn_predict_layers is not in config.json; %d layers draft tokens", path, len(inside))
    return config.draft_layers + len(inside)


def check_sizes(config: ModelConfig, names: Mapping[str, StoredTensor], path: Path, size: int) -> None:
    """Checks sizes before memory is taken for them.

    Args:
        config: The model's configuration.
        names: The checkpoint's tensors.
        path: The checkpoint.
        size: Bytes of its files.

    Raises:
        ConfigError: The configuration asks for more layers or numbers than there are; names the settings.
    """
    table, last = names.get(_EMBEDDING), f"model.layers.{config.num_layers - 1}."
    wanted = (config.vocab_size, config.hidden_size)
    if table is not None and table.shape != wanted and len(table.shape) == 2 and table.dtype in ("F32", "F16", "BF16"):
        raise ConfigError(
            f"{path}: tensor {_EMBEDDING} has shape {list(table.shape)}, the configuration asks for {list(wanted)}: "
            "vocab_size and hidden_size"
        )
    if table is not None and not any(name.startswith(last) for name in names):
        raise ConfigError(
            f"{path}: tensors of layer {config.num_layers - 1} are missing, the last of num_hidden_layers"
        )
    numbers = sum(map(config.layer_cost, range(config.num_layers))) + config.vocab_size * config.hidden_size
    if numbers * _FEWEST_BITS > 8 * size:
        raise ConfigError(
            f"{path}: the configuration asks for {numbers} numbers (hidden_size {config.hidden_size}, intermediate_size "
            f"{config.intermediate_size}, {config.num_layers} layers), the files have {size} bytes"
        )
