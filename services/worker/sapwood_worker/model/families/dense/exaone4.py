"""EXAONE 4: norms after attention and MLP and on heads; layers without a window know no position where others have one."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import PostNormDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.values import HfValues


def _from_hf(found: HfValues) -> ModelConfig:
    config, values = replace(found.llama(), qk_norm=True), found.values
    if found.given.get("sliding_window", values["sliding_window"]) is None:
        return config
    pattern, kinds = values["sliding_window_pattern"], values.get("layer_types")
    if kinds is None:
        if not isinstance(pattern, int):
            raise ValueError(f"sliding_window_pattern {pattern!r} without layer_types is not supported")
        kinds = ["sliding_attention" if (at + 1) % pattern else "full_attention" for at in range(found.layers)]
    windows = found.windows(kinds)
    ropes = tuple(None if window is None else rope for window, rope in zip(windows, config.ropes, strict=True))
    return replace(config, windows=windows, ropes=ropes)


EXAONE4 = ModelFamily(
    name="exaone4",
    unread={"sliding_window_pattern": (), "layer_types": ("full_attention",)},
    architectures=("Exaone4ForCausalLM",),
    classifiers=("Exaone4ForSequenceClassification",),
    layer=PostNormDecoderLayer,
    defaults={
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    from_hf=_from_hf,
    from_gguf=None,
)  # fmt: skip
