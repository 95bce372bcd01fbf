"""A family of models as one value: each family's file ends with such a value, and ``registry`` names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.gguf_values import GgufValues
from sapwood_worker.model.families.hf_values import HfValues


def _as_it_is(config: ModelConfig, values: object) -> ModelConfig:
    return config


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of decoder-only models.

    Attributes:
        name: Its name in ``GetModelInfo`` and in GGUF files (``general.architecture``).
        architectures: Its names in ``config.json``.
        layer: The class of its layers.
        defaults: Settings that ``config.json`` may leave out: the defaults of transformers' configuration classes.
        adapt: Turns the configuration that ``config.json`` would give a Llama into the family's. Raises ValueError if it cannot.
        in_gguf: Whether it is read from GGUF files.
        adapt_gguf: The same for a GGUF file.
        gguf_norms: Names of a layer's norms in GGUF files, beside ``attn_norm``, and in Hugging Face's.
        gguf_interleaves: Whether GGUF files hold the rows of queries and keys in interleaved rotary order.
    """

    name: str
    architectures: tuple[str, ...]
    layer: type[DecoderLayer]
    defaults: Mapping[str, Any]
    adapt: Callable[[ModelConfig, HfValues], ModelConfig] = _as_it_is
    in_gguf: bool = True
    adapt_gguf: Callable[[ModelConfig, GgufValues], ModelConfig] = _as_it_is
    gguf_norms: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({"ffn_norm": "post_attention_layernorm"})
    )
    gguf_interleaves: bool = False
