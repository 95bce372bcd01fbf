"""Models that see pictures or hear, ``...ForConditionalGeneration``: their language part is served if it is one of a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.names import WRAPPERS

_NESTED = ("text_config", "llm_config", "language_config")
_OTHERWISE = {"PaliGemmaForConditionalGeneration": "the tokens of its prompts see those after them"}
"""Wrappers whose language part computes otherwise than the family that its settings name."""
_MODEL_TYPES = {
    "gemma3_text": "gemma3", "llama4_text": "llama4", "kimi_k2": "deepseek_v3", "ministral": "mistral",
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "glm4v_text": "glm4",
    "qwen2_5_omni_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe",
}  # fmt: skip
"""``model_type`` of a language part -> the family, where it is not the family's name."""
_FLAT = {"Qwen2VLForConditionalGeneration": "qwen2", "Qwen2_5_VLForConditionalGeneration": "qwen2"}
"""Wrappers whose first files have the settings of both parts in one object."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
}  # fmt: skip
"""By family the defaults of transformers' classes: LLaVA's files leave them out of ``text_config``."""
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "text_model.model.": "model.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}
_SEEN_OR_HEARD = (
    "vision_tower.", "vision_model.", "vision_encoder.", "vision_embed_tokens.", "visual.", "audio_tower.", "audio_encoder.",
    "multi_modal_projector.", "mm_projector.", "projector.", "connector.", "patch_merger.", "mlp1.", "image_newline",
    "vision_language_adapter.", "embed_vision.", "embed_audio.",
)  # fmt: skip
_OTHER_PARTS = (
    *(start + part for start in ("", "model.", "thinker.") for part in _SEEN_OR_HEARD),
    *("talker.", "token2wav.", "code2wav."),
)


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """The language model that a ``config.json`` describes.

    Attributes:
        family: Its family, which knows how the wrapper's checkpoints name tensors.
        settings: Its settings, over those of the wrapper.
        own: The names of those that are not the wrapper's.
        defaults: Settings that the wrapper's files may leave out, beyond the family's.
    """

    family: ModelFamily
    settings: dict[str, Any]
    own: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def language_part(
    raw: Mapping[str, Any], architecture: str, known: Mapping[str, ModelFamily], path: Path
) -> LanguagePart | None:
    """The language model of a configuration.

    Args:
        raw: What ``config.json`` holds.
        architecture: The first name in ``architectures``.
        known: The families by such names.
        path: The file, for error messages.

    Returns:
        None: the architecture is neither a family's nor a wrapper.

    Raises:
        ConfigError: It is a wrapper, and its language part is not served; names that part.
    """
    thinker = raw.get("thinker_config")  # beside the part that speaks
    if isinstance(thinker, dict):
        raw = {
            **{name: value for name, value in raw.items() if name in ("architectures", "tie_word_embeddings")},
            **thinker,
        }
    key = next((key for key in _NESTED if raw.get(key) is not None), None)
    nested = {} if key is None else raw[key]
    if not isinstance(nested, dict):
        raise ConfigError(f"{path}: {key} is {nested!r:.60}; it can be an object")
    settings = {**{name: value for name, value in raw.items() if name != key}, **nested}
    own = frozenset(nested if nested else raw)
    family = known.get(architecture)
    if family is not None:
        return LanguagePart(family, settings, own)
    if not architecture.endswith(WRAPPERS):
        return None
    why = _OTHERWISE.get(architecture)
    names = nested.get("architectures")
    inner = names[0] if isinstance(names, list) and names else None
    kind = str(nested.get("model_type") or _FLAT.get(architecture) or "")
    by_name = {each.name: each for each in known.values()}
    found = known.get(str(inner)) or by_name.get(_MODEL_TYPES.get(kind, kind))
    if found is None or why is not None:
        what = inner or kind
        raise ConfigError(
            f"{path}: architecture {architecture}: its language part"
            + (f", {what}, is not supported" if what else " has no settings of its own (text_config)")
            + (f": {why}" if why else "")
            + "; docs/models.md lists those that are"
        )
    # A reader of pictures has a head of its own, which the outer settings may tie.
    settings.setdefault("tie_word_embeddings", raw.get("tie_word_embeddings"))
    wrapped = replace(
        found, prefixes={**found.prefixes, **_PREFIXES}, skipped=(*found.skipped, *_OTHER_PARTS), classifiers=()
    )
    return LanguagePart(wrapped, settings, own, _DEFAULTS.get(found.name, MappingProxyType({})))
