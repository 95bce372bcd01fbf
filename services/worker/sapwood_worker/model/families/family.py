"""What is particular to a family of models, in one value: a family is a file that ends with one, and a line in ``registry``."""

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
        name: What ``GetModelInfo`` calls it, and GGUF files (``general.architecture``).
        architectures: What ``config.json`` calls it.
        layer: Its layers.
        defaults: What ``config.json`` may leave out, because transformers' configuration classes have it as a default.
        adapt: Makes the configuration of the one that ``config.json`` would give a Llama. Raises ValueError where it cannot.
        in_gguf: Whether it is read from GGUF files.
        adapt_gguf: As ``adapt``, for a GGUF file.
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
