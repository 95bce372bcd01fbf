"""Texts that sentence-transformers puts before those that it embeds, by name: ``config_sentence_transformers.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a model.

    Attributes:
        texts: Each by its name.
        default: The name of the one that is meant if a request names none; "": none is.
    """

    texts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default: str = ""


NO_PROMPTS = Prompts()


def read_prompts(file: Path) -> Prompts:
    """Reads the file; there may be none.

    Raises:
        ConfigError: It cannot be read, or its default is no prompt of its own.
    """
    values = read_json_object(file) if file.is_file() else {}
    texts, default = values.get("prompts") or {}, values.get("default_prompt_name") or ""
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ConfigError(f"{file}: prompts is {texts!r:.60}; it can be an object of texts")
    if default and (not isinstance(default, str) or default not in texts):
        raise ConfigError(
            f"{file}: default_prompt_name {default!r:.60} is none of prompts ({', '.join(texts) or 'none'})"
        )
    return Prompts(MappingProxyType(texts), default)
