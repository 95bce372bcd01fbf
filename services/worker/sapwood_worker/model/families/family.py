"""A family of models as one value: each family's file ends with such a value, and ``registry`` names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.fused import FusedRows
from sapwood_worker.model.families.gguf_values import GgufValues
from sapwood_worker.model.families.hf_values import HfValues
from sapwood_worker.model.families.known_keys import Allowed
from sapwood_worker.model.families.kv_layout import attention_layout
from sapwood_worker.records.kv_layout import KVLayout

_LLAMA_NORMS = MappingProxyType({"ffn_norm": "post_attention_layernorm"})


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of decoder-only models: all that its files say of it, and what they mean.

    Attributes:
        name: Its name in ``GetModelInfo``.
        architectures: Its names in ``config.json``.
        classifiers: The same of those with a head that classifies.
        layer: The class of its layers. Their weights have the names of Hugging Face checkpoints.
        defaults: Settings that ``config.json`` may leave out: the defaults of transformers' configuration classes.
        from_hf: The configuration that ``config.json`` gives. Raises ValueError, saying what is not supported.
        from_gguf: The same for the metadata of a GGUF file. None: it is not read from such files.
        gguf_name: What GGUF files call it (``general.architecture``); empty: ``name``.
        gguf_names: Names of a layer's tensors in GGUF files that differ from family to family, and in Hugging Face's.
        gguf_interleaves: Whether GGUF files hold the rows of queries and keys in interleaved rotary order.
        prefixes: How names in Hugging Face checkpoints may begin, and how ours do instead.
        fused: Projections that Hugging Face checkpoints store as one tensor, by the configuration.
        skipped: How names of tensors begin that are no part of the language model.
        unread: Settings of ``config.json`` that its files may have and nothing reads, with the values that they may have.
        kv_layout: What a token leaves in the KV cache, by the configuration, the cache's dtype and the page size.
    """

    name: str
    architectures: tuple[str, ...]
    layer: type[DecoderLayer]
    defaults: Mapping[str, Any]
    from_hf: Callable[[HfValues], ModelConfig] = HfValues.llama
    from_gguf: Callable[[GgufValues], ModelConfig] | None = GgufValues.llama
    gguf_name: str = ""
    gguf_names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NORMS)
    gguf_interleaves: bool = False
    prefixes: Mapping[str, str] = field(default_factory=dict)
    fused: Callable[[ModelConfig], FusedRows] = lambda config: {}
    skipped: tuple[str, ...] = ()
    kv_layout: Callable[[ModelConfig, str, int], KVLayout] = attention_layout
    classifiers: tuple[str, ...] = ()
    unread: Mapping[str, Allowed] = field(default_factory=dict)
