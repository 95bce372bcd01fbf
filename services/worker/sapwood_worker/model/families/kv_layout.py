"""The layout of the KV cache of models with grouped attention."""

from __future__ import annotations

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.records.kv_layout import KVComponent, KVLayout, Needed


def attention_layout(config: ModelConfig, dtype: str, page_size: int) -> KVLayout:
    """Keys and values of every layer; those that layers of one window keep are a component of their own.

    Args:
        config: The model's configuration.
        dtype: Of keys and values, by torch's name.
        page_size: Tokens in a page.
    """
    layers: dict[Needed, list[int]] = {"all": []}
    for index, window in enumerate(config.windows):
        needed: Needed = "all" if window is None or window >= config.max_position else window
        layers.setdefault(needed, []).append(index)
    return KVLayout(
        tuple(
            KVComponent(tuple(each), 2, config.num_kv_heads, config.head_dim, dtype, needed=needed)
            for needed, each in layers.items()
            if each
        ),
        page_size,
    )
