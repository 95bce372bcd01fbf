"""Reads ``config.json`` of a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.counts import check_counts
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.hf_values import HfValues, read_json
from sapwood_worker.model.families.label_head import read_labels
from sapwood_worker.model.families.registry import families


def read_hf_config(directory: Path) -> tuple[ModelFamily, ModelConfig]:
    """The family and the configuration of a Hugging Face model directory.

    Raises:
        ConfigError: Unreadable, or something in it is not supported; names the file and what.
    """
    path = directory / "config.json"
    raw = read_json(path)
    names = raw.get("architectures") or ["(none)"]
    known = {name: family for family in families() for name in (*family.architectures, *family.classifiers)}
    family = known.get(names[0])
    if family is None:
        alike = get_close_matches(names[0], known, 3)
        shown = f", such as {', '.join(alike)}" if alike else ""
        raise ConfigError(
            f"{path}: architecture {names[0]} is not supported; {len(known)} are{shown}: docs/models.md lists them"
        )
    nested = raw.get("text_config")
    given = {**raw, **nested} if isinstance(nested, dict) else raw
    values = {**family.defaults, **{key: value for key, value in given.items() if value is not None}}
    try:
        check_counts(values, family.defaults)
        found = HfValues(family.name, given, values)
        config = family.from_hf(found)
        if names[0] in family.classifiers:
            config = replace(config, labels=read_labels(raw))
        return family, config
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def classifies(directory: Path) -> bool:
    """Whether the model of a directory is one of a family's with a head that classifies. Raises ConfigError: unreadable."""
    names = read_json(directory / "config.json").get("architectures") or [""]
    return any(names[0] in family.classifiers for family in families())


def read_hf_eos(directory: Path) -> tuple[int, ...]:
    """End-of-sequence token ids: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        raw = read_json(path)
        nested = raw.get("text_config")
        found = raw.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def read_hf_quantization(directory: Path) -> Mapping[str, Any]:
    """How ``config.json`` says that weights are quantised, ``quantization_config``; empty if they are not.

    modelopt's older checkpoints say it in a file of their own, ``hf_quant_config.json``.
    """
    raw = read_json(directory / "config.json")
    nested = raw.get("text_config")
    inner = nested.get("quantization_config") if isinstance(nested, dict) else None
    found: Mapping[str, Any] = raw.get("quantization_config") or inner or {}
    own = directory / "hf_quant_config.json"
    if not found and own.is_file():
        return {"quant_method": "modelopt", **(read_json(own).get("quantization") or {})}
    return found
