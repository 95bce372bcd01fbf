"""Reads ``config.json`` of a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.checkpoint.wrapped import language_part
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.counts import check_counts
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.known_keys import CONFIG, refusal, short
from sapwood_worker.model.families.label_head import read_labels
from sapwood_worker.model.families.registry import families
from sapwood_worker.model.families.settings import Settings


def read_hf_config(directory: Path) -> tuple[ModelFamily, ModelConfig]:
    """The family and the configuration of a Hugging Face model directory.

    Raises:
        ConfigError: Unreadable, or something in it is not supported, or nothing reads it; names the file and what.
    """
    path = directory / "config.json"
    raw = read_json_object(path)
    name = _architecture(raw, path)
    known = {name: family for family in families() for name in (*family.architectures, *family.classifiers)}
    bare = {
        name.replace("ForCausalLM", "Model"): family for name, family in known.items() if name.endswith("ForCausalLM")
    }
    part = language_part(raw, name, {**bare, **known}, path)
    if part is None:
        alike = get_close_matches(name, known, 3)
        shown = f", such as {', '.join(alike)}" if alike else ""
        raise ConfigError(
            f"{path}: architecture {name} is not supported; {len(known)} are{shown}: docs/models.md lists them"
        )
    family, given = part.family, Settings(part.settings)
    values = given.over({**family.defaults, **part.defaults})
    try:
        check_counts({key: each for key, each in part.settings.items() if each is not None}, family.defaults)
        _check_kinds(part.settings)
        config = family.from_hf(HfValues(family.name, given, values))
        if name in family.classifiers:
            config = replace(config, labels=read_labels(raw))
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        last = given.reads.last.partition(".")[0]
        shown = f"{last} ({short(part.settings.get(last, family.defaults.get(last)))})"
        raise ConfigError(f"{path}: {shown} is not what such a setting can be: {error}") from error
    _refuse_unread(path, family, given, part.own)
    return family, config


def _refuse_unread(path: Path, family: ModelFamily, given: Settings, own: frozenset[str]) -> None:
    """Raises ConfigError if the file has settings that nothing reads and that are not known to be harmless.

    Args:
        path: The file.
        family: The model's family.
        given: The settings, as they were read.
        own: Those that are the language model's, not a wrapper's.
    """
    if given.get("use_sliding_window", True) is False:
        given.idle("sliding_window", "max_window_layers", "layer_types")
    if given.same("rope_parameters", "rope_scaling"):
        given.idle(*(name for name in given.flat() if name.partition(".")[0] == "rope_scaling"))
    unread = {name: value for name, value in given.unread().items() if name.partition(".")[0] in own}
    refused = CONFIG.refused(unread, family.unread, given.flat())
    if refused:
        raise ConfigError(refusal(str(path), refused))


def _check_kinds(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting whose value is of another kind than all files have there; names it."""
    for key in ("rope_parameters", "rope_scaling"):
        if settings.get(key) is not None and not isinstance(settings[key], dict):
            raise ValueError(f"{key} is {short(settings[key])}; it can be an object")
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers", "mlp_only_layers", "moe_layers"):
        if settings.get(key) is not None and not isinstance(settings[key], list):
            raise ValueError(f"{key} is {short(settings[key])}; it can be a list")


def _architecture(raw: Mapping[str, Any], path: Path) -> str:
    names = raw.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{path}: architectures is {short(names)}; it can be a list of names")
    return names[0]


def classifies(directory: Path) -> bool:
    """Whether the model of a directory is one of a family's with a head that classifies. Raises ConfigError: unreadable."""
    path = directory / "config.json"
    name = _architecture(read_json_object(path), path)
    return any(name in family.classifiers for family in families())
