"""Reads ``config.json`` of a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.hf_values import HfValues, read_json
from sapwood_worker.model.families.registry import families


def read_hf_config(directory: Path) -> tuple[ModelFamily, ModelConfig]:
    """The family and the configuration of a Hugging Face model directory.

    Raises:
        ConfigError: Unreadable, or something in it is not supported; names the file and what.
    """
    path = directory / "config.json"
    raw = read_json(path)
    names = raw.get("architectures") or ["(none)"]
    known = {architecture: family for family in families() for architecture in family.architectures}
    family = known.get(names[0])
    if family is None:
        raise ConfigError(f"{path}: architecture {names[0]} is not supported (supported: {', '.join(known)})")
    nested = raw.get("text_config")
    given = {**raw, **nested} if isinstance(nested, dict) else raw
    values = {**family.defaults, **{key: value for key, value in given.items() if value is not None}}
    try:
        found = HfValues(given, values)
        return family, family.adapt(_usual(family.name, found), found)
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


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
    """How ``config.json`` says that weights are quantised, ``quantization_config``; empty if they are not."""
    raw = read_json(directory / "config.json")
    nested = raw.get("text_config")
    inner = nested.get("quantization_config") if isinstance(nested, dict) else None
    return raw.get("quantization_config") or inner or {}


def _usual(name: str, found: HfValues) -> ModelConfig:
    """The configuration that the file gives a Llama; families then adapt it."""
    values = found.values
    heads = int(values["num_attention_heads"])
    head_dim = int(values.get("head_dim") or values["hidden_size"] // heads)
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    if values.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported")
    bias = bool(values.get("attention_bias", False))
    return ModelConfig(
        architecture=name,
        vocab_size=int(values["vocab_size"]),
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values["intermediate_size"]),
        num_layers=found.layers,
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        max_position=int(values["max_position_embeddings"]),
        rope=found.rope(values.get("rope_parameters") or values.get("rope_scaling"), float(values["rope_theta"])),
        local_rope=None,
        windows=(None,) * found.layers,
        activation=found.activation("hidden_act"),
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
        attention_scale=head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
    )
