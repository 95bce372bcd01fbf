"""SmolLM3: Llama's layers; every fourth layer has no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LlamaDecoderLayer
from sapwood_worker.model.families.values import GgufValues, HfValues

_INTERVAL = 4


def _from_hf(found: HfValues) -> ModelConfig:
    config, values = found.llama(), found.values
    interval = int(values["no_rope_layer_interval"])
    # 1 for a layer that has rotary embedding, whatever the name says.
    rotated = values.get("no_rope_layers") or [(index + 1) % interval for index in range(found.layers)]
    if len(rotated) != found.layers:
        raise ValueError(f"no_rope_layers has {len(rotated)} entries for {found.layers} layers")
    ropes = tuple(rope if turns else None for rope, turns in zip(config.ropes, rotated, strict=True))
    return replace(config, ropes=ropes, windows=_windows(found))


def _windows(found: HfValues) -> tuple[int | None, ...]:
    kinds = found.values.get("layer_types")
    if kinds is not None and "sliding_attention" not in kinds:
        found.values.idle("sliding_window", "use_sliding_window")
    if kinds is None:
        if found.values.get("use_sliding_window") and found.values.get("sliding_window") is not None:
            raise ValueError("use_sliding_window without layer_types is not supported")
        return (None,) * found.layers
    return found.windows(kinds) if "sliding_attention" in kinds else (None,) * found.layers


def _from_gguf(values: GgufValues) -> ModelConfig:
    config = values.llama()
    ropes = tuple(rope if (index + 1) % _INTERVAL else None for index, rope in enumerate(config.ropes))
    return replace(config, ropes=ropes)


SMOLLM3 = ModelFamily(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    classifiers=("SmolLM3ForSequenceClassification",),
    layer=LlamaDecoderLayer,
    defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "no_rope_layer_interval": _INTERVAL},
    from_hf=_from_hf,
    from_gguf=_from_gguf,
    gguf_interleaves=True,
)
