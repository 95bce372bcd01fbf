"""Cohere's Command R (1) and Command R7B and A (2): LayerNorms, attention and MLP side by side, neighbours turned together."""

from __future__ import annotations

from dataclasses import replace

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import ParallelDecoderLayer
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.values import HfValues


def _common(found: HfValues) -> ModelConfig:
    values = found.values
    return replace(
        found.interleaved().llama(),
        norm="layer",
        rms_norm_eps=float(values["layer_norm_eps"]),
        logit_scale=float(values["logit_scale"]),
    )


def _cohere(found: HfValues) -> ModelConfig:
    return replace(_common(found), qk_norm=bool(found.values.get("use_qk_norm", False)), qk_norm_kind="layer")


def _cohere2(found: HfValues) -> ModelConfig:
    config, pattern = _common(found), int(found.values["sliding_window_pattern"])
    kinds = found.values.get("layer_types") or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(found.layers)
    ]
    windows = found.windows(kinds)
    # Layers without a window know no position.
    ropes = tuple(None if window is None else rope for window, rope in zip(windows, config.ropes, strict=True))
    return replace(config, windows=windows, ropes=ropes)


_DEFAULTS = {
    "tie_word_embeddings": True, "rope_theta": 10_000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
}  # fmt: skip

_AS_ALL: dict[str, tuple[object, ...]] = {
    "order_of_interleaved_layers": ("local_attn_first",), "position_embedding_type": ("rope_gptj",),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,), "layer_switch": (4,), "use_qk_norm": (False,), "sliding_window_pattern": (),
}  # fmt: skip
COHERE = ModelFamily(
    name="cohere",
    unread=_AS_ALL,
    architectures=("CohereForCausalLM",),
    layer=ParallelDecoderLayer,
    defaults=_DEFAULTS,
    from_hf=_cohere,
    from_gguf=None,
)
COHERE2 = ModelFamily(
    name="cohere2",
    unread=_AS_ALL,
    architectures=("Cohere2ForCausalLM",),
    layer=ParallelDecoderLayer,
    defaults={**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    from_hf=_cohere2,
    from_gguf=None,
)
