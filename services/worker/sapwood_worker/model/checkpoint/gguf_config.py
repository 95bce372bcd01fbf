"""Reads a model's configuration from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufFile
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.gguf_values import GgufValues
from sapwood_worker.model.families.registry import families

# Ends of a turn, which chat models emit instead of the end of the text.
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
_CONTROL, _USER_DEFINED = 3, 4


def read_gguf_config(
    file: GgufFile, rope_tensors: Mapping[str, tuple[float, ...]] | None = None
) -> tuple[ModelFamily, ModelConfig]:
    """The family and the configuration of a GGUF model.

    Args:
        file: The open file.
        rope_tensors: The values of those of ``ROPE_TENSORS`` that it has.

    Raises:
        ConfigError: The architecture or something in it is not supported, or a key is missing; names the file.
    """
    name = file.metadata.get("general.architecture")
    known = {family.gguf_name or family.name: family for family in families() if family.from_gguf is not None}
    family = known.get(str(name))
    if family is None or family.from_gguf is None:
        raise ConfigError(f"{file.path}: architecture {name} is not supported (supported: {', '.join(known)})")
    try:
        config = family.from_gguf(GgufValues(file, str(name), rope_tensors or {}))
        return family, replace(config, architecture=family.name)
    except KeyError as error:
        raise ConfigError(f"{file.path}: {error.args[0]!r} is missing") from error
    except ValueError as error:
        raise ConfigError(f"{file.path}: {error}") from error


def read_gguf_eos(file: GgufFile) -> tuple[int, ...]:
    """End tokens: those the metadata names, and the usual ends of a turn that are special tokens of the vocabulary."""
    found = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids = {int(token) for token in found if token is not None}
    tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    special = (i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED))
    ids.update(i for i in special if tokens[i] in _TURN_ENDS)
    return tuple(sorted(ids))
