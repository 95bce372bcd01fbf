"""The definition of a family of models: its names, layers, settings, and its KV cache layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.families.known_keys import Allowed
from sapwood_worker.model.families.values import GgufValues, HfValues
from sapwood_worker.records.kv_layout import KVComponent, KVLayout, Needed
from sapwood_worker.records.model_info import Labels

# Projections that some families' checkpoints store as one tensor, their rows one after the other.


FusedRows = Mapping[str, Mapping[str, int]]
"""The name of a stored projection within a layer -> the names of its parts, with each one's rows, in order."""


def fused_qkv(config: ModelConfig, name: str = "qkv_proj") -> FusedRows:
    """A projection, ``qkv_proj`` if it has no other name, holds the queries, keys and values."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {f"self_attn.{name}": {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}}


def fused_gate_up(config: ModelConfig) -> FusedRows:
    """``gate_up_proj`` holds the MLP's gate and up projections."""
    inner = config.intermediate_size
    return {"mlp.gate_up_proj": {"mlp.gate_proj": inner, "mlp.up_proj": inner}}


# The layout of the KV cache, by the kind of attention.


def attention_layout(config: ModelConfig, dtype: str, page_size: int) -> KVLayout:
    """Every layer keeps keys and values, or the one vector of latent attention, which each rank has whole.

    Layers with a state keep that instead, or besides. What layers of one window keep is a component of its own. Where all layers
    have windows or none has attention, the first table of pages is one that no layer keeps anything in: it tells the prefix cache
    which tokens there were.

    Args:
        config: The model's configuration.
        dtype: The dtype of keys and values, by torch's name.
        page_size: Tokens in a page.
    """
    layers: dict[Needed, list[int]] = {"all": []}
    for index, window in enumerate(config.windows):
        if not config.attends(index):
            continue
        needed: Needed = "all" if window is None or window >= config.max_position else window
        layers.setdefault(needed, []).append(index)
    paged = tuple(_component(config, tuple(each), dtype, needed) for needed, each in layers.items())
    sizes = {(each.heads, each.numbers // each.heads) for each in config.states if each is not None}
    # Drift of a sum over many tokens is too large in fewer bits.
    states = tuple(KVComponent(config.state_layers, 1, *size, "float32", needed="state") for size in sizes)
    return KVLayout((*paged, *states), page_size)


def _component(config: ModelConfig, layers: tuple[int, ...], dtype: str, needed: Needed) -> KVComponent:
    if config.latent is None:
        return KVComponent(layers, 2, config.num_kv_heads, config.head_dim, dtype, needed=needed)
    return KVComponent(layers, 1, 1, config.latent.cached_dim, dtype, sharding="replicated", needed=needed)


# The settings of ``config.json`` for a classification head.


_BY_PROBLEM: dict[str, Literal["softmax", "sigmoid", "none"]] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_BY_CLASS: dict[str, Literal["sigmoid", "none"]] = {"Sigmoid": "sigmoid", "Identity": "none"}


def read_labels(values: Mapping[str, Any]) -> Labels:
    """The labels, and what makes scores of their logits.

    What sentence-transformers notes for its cross-encoders comes first, then ``problem_type``; else one label is a yes or no by
    itself and several share 1.

    Args:
        values: The settings in the file.

    Raises:
        ValueError: There are none, or an activation is not supported.
    """
    names = values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(values.get("num_labels", 2))}
    try:
        labels = tuple(str(names[index]) for index in sorted(names, key=int))
    except (TypeError, ValueError):
        raise ValueError(f"id2label is no mapping of numbers to names: {names!r}") from None
    if not labels:
        raise ValueError("id2label names no label")
    noted = (values.get("sentence_transformers") or {}).get("activation_fn")
    noted = noted or values.get("sbert_ce_default_activation_function")
    if noted is not None:
        name = str(noted).rpartition(".")[2]
        if name not in _BY_CLASS:
            raise ValueError(f"activation {noted} is not supported ({', '.join(_BY_CLASS)} are)")
        return Labels(labels, _BY_CLASS[name])
    problem = values.get("problem_type")
    if problem is None:
        return Labels(labels, "sigmoid" if len(labels) == 1 else "softmax")
    if problem not in _BY_PROBLEM:
        raise ValueError(f"problem_type {problem!r} is not supported ({', '.join(_BY_PROBLEM)} are)")
    return Labels(labels, _BY_PROBLEM[problem])


_LLAMA_NORMS = MappingProxyType({"ffn_norm": "post_attention_layernorm"})


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of decoder-only models: the settings in its files, and their meaning.

    Attributes:
        name: Its name in ``GetModelInfo``.
        architectures: Its names in ``config.json``.
        classifiers: The same of those with a head that classifies.
        layer: The class of its layers. Their weights have the names of Hugging Face checkpoints.
        defaults: Settings that ``config.json`` may leave out: the defaults of transformers' configuration classes.
        from_hf: The configuration that ``config.json`` gives. Raises ValueError, saying what is not supported.
        from_gguf: The same for the metadata of a GGUF file. None: it is not read from such files.
        to_gguf: The settings that a GGUF file of a configuration has, without the architecture's name: the inverse of
            ``from_gguf``. None: such files are not written.
        gguf_name: What GGUF files call it (``general.architecture``); empty: ``name``.
        gguf_names: Names of a layer's tensors in GGUF files that differ from family to family, and in Hugging Face's.
        gguf_interleaves: Whether GGUF files hold the rows of queries and keys in interleaved rotary order.
        prefixes: How names in Hugging Face checkpoints may begin, and how ours do instead.
        fused: Projections that Hugging Face checkpoints store as one tensor, by the configuration.
        groups: In how many parts of such a tensor each projection lies: of each part it has the same rows.
        transposed: Whether checkpoints hold matrices of layers as [inputs, outputs].
        renamed: Names inside those of Hugging Face checkpoints, between dots, that ours differ from.
        by_rows: Whether checkpoints hold the experts' projections as [experts, outputs, inputs], not transposed, where they hold
            all experts as one tensor.
        skipped: How names of tensors begin that are no part of the language model.
        unread: Settings of ``config.json`` that its files may have and nothing reads, with the values that they may have.
        kv_layout: Makes the layout of the KV cache from the configuration, the cache's dtype and the page size.
    """

    name: str
    architectures: tuple[str, ...]
    layer: type[DecoderLayer]
    defaults: Mapping[str, Any]
    from_hf: Callable[[HfValues], ModelConfig] = HfValues.llama
    from_gguf: Callable[[GgufValues], ModelConfig] | None = GgufValues.llama
    to_gguf: Callable[[ModelConfig], dict[str, Any]] | None = None
    gguf_name: str = ""
    gguf_names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NORMS)
    gguf_interleaves: bool = False
    prefixes: Mapping[str, str] = field(default_factory=dict)
    fused: Callable[[ModelConfig], FusedRows] = lambda config: {}
    groups: Callable[[ModelConfig], int] = lambda config: 1
    transposed: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    by_rows: bool = False
    skipped: tuple[str, ...] = ()
    kv_layout: Callable[[ModelConfig, str, int], KVLayout] = attention_layout
    classifiers: tuple[str, ...] = ()
    unread: Mapping[str, Allowed] = field(default_factory=dict)
