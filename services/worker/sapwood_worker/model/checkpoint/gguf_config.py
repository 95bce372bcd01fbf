"""Reads a model's configuration from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufFile
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.gguf_values import GgufValues
from sapwood_worker.model.families.known_keys import GGUF, refusal, short
from sapwood_worker.model.families.registry import families


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
    values = GgufValues(file, str(name), rope_tensors or {})
    try:
        config = family.from_gguf(values)
        config = replace(config, architecture=family.name)
    except KeyError as error:
        raise ConfigError(f"{file.path}: {error.args[0]!r} is missing") from error
    except ValueError as error:
        raise ConfigError(f"{file.path}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        last = values.reads.last
        raise ConfigError(
            f"{file.path}: {last} ({short(file.metadata.get(last))}) is not what such a setting can be: {error}"
        ) from error
    settings = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.") and key not in values.reads.names
    }
    if refused := GGUF.refused(settings):
        raise ConfigError(refusal(str(file.path), {values.named(key): value for key, value in refused.items()}))
    return family, config
