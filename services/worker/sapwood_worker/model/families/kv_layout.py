"""The layout of the KV cache, by the kind of attention."""

from __future__ import annotations

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.records.kv_layout import KVComponent, KVLayout, Needed


def attention_layout(config: ModelConfig, dtype: str, page_size: int) -> KVLayout:
    """Every layer keeps keys and values, or the one vector of latent attention, which each rank has whole.

    What layers of one window keep is a component of its own. Where all layers have windows, the first table of pages is one that
    no layer keeps anything in: it tells the prefix cache which tokens there were.

    Args:
        config: The model's configuration.
        dtype: The dtype of keys and values, by torch's name.
        page_size: Tokens in a page.
    """
    layers: dict[Needed, list[int]] = {"all": []}
    for index, window in enumerate(config.windows):
        needed: Needed = "all" if window is None or window >= config.max_position else window
        layers.setdefault(needed, []).append(index)
    return KVLayout(
        tuple(_component(config, tuple(each), dtype, needed) for needed, each in layers.items()),
        page_size,
    )


def _component(config: ModelConfig, layers: tuple[int, ...], dtype: str, needed: Needed) -> KVComponent:
    if config.latent is None:
        return KVComponent(layers, 2, config.num_kv_heads, config.head_dim, dtype, needed=needed)
    return KVComponent(layers, 1, 1, config.latent.cached_dim, dtype, sharding="replicated", needed=needed)
