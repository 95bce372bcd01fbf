"""Paged attention in plain torch operations, for any device.

A step's queries are cut into *tiles*: one decode token, or up to ``_TILE`` consecutive tokens of a prompt chunk. A tile needs
the keys of one contiguous range of positions: from its first token's window to its last token. Tiles of similar shape (the
same powers of two) are padded to one shape and computed in one batched call, so padding less than doubles either side. A tile
reads only the keys its tokens see; a prompt of N tokens costs O(N^2 / 2) without and O(N (window + tile)) with a window.

The plan (which rows, which slots, which mask) is made once a step for each distinct window and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_worker.model.attention.backend import (
    Abilities,
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionParts,
    StepAttention,
)
from sapwood_worker.model.attention.torch_shared import TorchSharedAttention
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.records.kv_layout import KVComponent

_TILE = 256
# Tiles of at least this many queries are computed alone: batching them gains nothing and costs padding.
_ALONE = 32
# Latent attention makes the keys of all of a tile's positions anew: more queries share that, and the mask has more numbers.
_LATENT_TILE = 1024
_EXPANDED = 1 << 26
"""Numbers of keys and values that are expanded at once."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Group:
    """B tiles computed in one call, each with N queries and M keys.

    Attributes:
        rows: int64 [B * N]: the queries' rows in the step; None when they are all rows in order.
        keys: int64 [B * K * M]: the pool's rows with their keys and values.
        mask: [B, 1, 1, N, M], 0 where a query sees a key and -inf where not; None when every query sees every key.
        kept: Positions in B * N that are not padding; None when all are kept.
        kept_rows: ``rows[kept]``.
        size: B.
    """

    rows: Tensor | None
    keys: Tensor
    mask: Tensor | None
    kept: Tensor | None
    kept_rows: Tensor | None
    size: int


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Arrays [number of tiles]: request, first row, query count, position of the first query, first key, key count."""

    request: IntArray
    row: IntArray
    queries: IntArray
    position: IntArray
    key: IntArray
    keys: IntArray


class TorchAttention:
    """Implements :class:`sapwood_worker.model.attention.backend.StepAttention` for any ragged batch.

    Args:
        pool: Keys and values.
        dtype: The dtype of the queries.
        tile: Most queries of a tile.
    """

    def __init__(self, pool: DevicePool, dtype: torch.dtype, tile: int = _TILE) -> None:
        self._pool = pool
        self._dtype = dtype
        self._tile = tile
        self._batch: AttentionBatch
        self._groups: dict[tuple[int | None, bool, KVComponent], list[_Group]] = {}

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._groups = {}

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        kind = layer.window, layer.chunked, self._pool.kept[layer.index]
        groups = self._groups.get(kind)
        if groups is None:
            groups = self._groups[kind] = self._plan(layer)
        if len(groups) == 1 and groups[0].rows is None:
            result = self._attend(layer, query, groups[0])
            return result if out is None else out.copy_(result.view_as(out))
        result = layer.empty_result(query) if out is None else out
        flat = result.view(len(query), -1)
        for group in groups:
            assert group.rows is not None
            part = self._attend(layer, query.index_select(0, group.rows), group)
            if group.kept is None:
                flat.index_copy_(0, group.rows, part)
            else:
                assert group.kept_rows is not None
                flat.index_copy_(0, group.kept_rows, part.index_select(0, group.kept))
        return result

    def _attend(self, layer: AttentionLayer, query: Tensor, group: _Group) -> Tensor:
        keys, values = self._pool.gather(layer.index, group.keys, query.dtype)
        if layer.latent is not None:
            return _attend_latent(layer, layer.latent, query, keys, group)
        return _attend(layer, query, keys, values, group, self._pool.kept[layer.index].heads)

    def _plan(self, layer: AttentionLayer) -> list[_Group]:
        tiles = _cut(self._batch, layer, self._tile)
        total = int(self._batch.query_starts[-1])
        # Tiles of equal key are padded together. Each large tile gets a key of its own.
        number = np.arange(len(tiles.row))
        kind = np.where(tiles.queries >= _ALONE, -1 - number, _log2(tiles.queries) * 64 + _log2(tiles.keys))
        kinds, inverse = np.unique(kind, return_inverse=True)
        return [self._group(tiles, np.flatnonzero(inverse == i), total, layer) for i in range(len(kinds))]

    def _group(self, tiles: _Tiles, chosen: IntArray, total: int, layer: AttentionLayer) -> _Group:
        queries, keys = tiles.queries[chosen], tiles.keys[chosen]
        most_queries, most_keys = int(queries.max()), int(keys.max())
        nth_query, nth_key = np.arange(most_queries), np.arange(most_keys)
        # Padding repeats the last query and the last key, so it reads only what is written.
        offset = np.minimum(nth_query[None], queries[:, None] - 1)
        rows = tiles.row[chosen, None] + offset
        query_at = tiles.position[chosen, None] + offset
        key_at = tiles.key[chosen, None] + nth_key[None]
        last = (tiles.key[chosen] + keys - 1)[:, None]
        read_at = np.minimum(key_at, last)
        size = self._pool.page_size
        pages = self._batch.page_table[tiles.request[chosen, None], read_at // size]
        slots = pages.astype(np.int64) * size + read_at % size
        hidden = key_at[:, None] > query_at[..., None]
        if layer.window is not None:
            hidden |= key_at[:, None] < layer.oldest_seen(query_at)[..., None]
        in_order = rows.size == total and bool((rows.ravel() == np.arange(total)).all())
        kept = None if int(queries.min()) == most_queries else np.flatnonzero((nth_query < queries[:, None]).ravel())
        return _Group(
            rows=None if in_order else self._tensor(rows.ravel()),
            keys=self._tensor(self._pool.rows(layer.index, slots).ravel()),
            mask=self._mask(hidden) if hidden.any() else None,
            kept=None if kept is None else self._tensor(kept),
            kept_rows=None if kept is None else self._tensor(rows.ravel()[kept]),
            size=len(chosen),
        )

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._pool.device, non_blocking=True)

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        seen = torch.from_numpy(hidden).to(self._pool.device, non_blocking=True)[:, None, None]
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(seen, float("-inf"))


def _cut(batch: AttentionBatch, layer: AttentionLayer, tile: int) -> _Tiles:
    lengths = np.diff(batch.query_starts)
    counts = -(-lengths // tile)
    request = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = nth * tile
    queries = np.minimum(lengths[request] - first, tile)
    row = batch.query_starts[:-1][request] + first
    position = (batch.seq_lens - lengths)[request] + first
    key = layer.oldest_seen(position)
    return _Tiles(request, row, queries, position, key, position + queries - key)


def _log2(values: IntArray) -> IntArray:
    return np.ceil(np.log2(values)).astype(np.int64)


def _attend(layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor, group: _Group, kv_heads: int) -> Tensor:
    """[B * N, H, D], keys [B * K * M, D] and values [B * K * M, V] -> [B * N, H * V]."""
    size, heads, dim = group.size, query.shape[1], query.shape[2]
    shared = heads // kv_heads
    # [B, K, shared, N, D]; key and value [B, K, M, D].
    query = query.view(size, -1, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
    key, value = (each.reshape(size, kv_heads, -1, each.shape[1]) for each in (keys, values))
    count = query.shape[3]
    # The heads that share a key head become further queries of it, so keys are not repeated.
    stacked = query.reshape(size, kv_heads, shared * count, dim)
    mask = group.mask
    if mask is not None:
        mask = mask.expand(-1, -1, shared, -1, -1).reshape(size, 1, shared * count, -1)
    if layer.softcap is None and layer.sinks is None:
        result = F.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=layer.scale)
    else:
        scores = torch.matmul(stacked, key.transpose(2, 3)).mul_(layer.scale)
        if layer.softcap is not None:
            scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
        if mask is not None:
            scores += mask
        if layer.sinks is None:
            weights = scores.softmax(-1)
        else:
            column = layer.sinks.to(scores.dtype).view(kv_heads, shared, 1, 1).expand(size, -1, -1, count, 1)
            weights = torch.cat((scores, column.reshape(*scores.shape[:3], 1)), -1).softmax(-1)[..., :-1]
        result = torch.matmul(weights, value)
    result = result.view(size, kv_heads, shared, count, -1)
    return result.permute(0, 3, 1, 2, 4).reshape(size * count, -1)


def _attend_latent(layer: AttentionLayer, latent: LatentHeads, query: Tensor, stored: Tensor, group: _Group) -> Tensor:
    """[B * N, H, D] and cached vectors [B * M, R + E] -> [B * N, H * V]."""
    heads = query.shape[1]
    if not 0 < latent.expands_from <= len(query) // group.size:
        absorbed = latent.absorb(query)
        result = _attend(layer, absorbed, stored, stored[:, : latent.rank], group, 1)
        return latent.values(result.view(len(query), heads, -1)).flatten(1)
    # Some heads at a time: expanded, a long prompt's keys are many times what is cached of them.
    each = max(1, _EXPANDED // (len(stored) * (query.shape[2] + latent.value_dim)))
    parts = []
    for start in range(0, heads, each):
        some = slice(start, min(start + each, heads))
        count = some.stop - start
        key, value = (_by_head(found, group.size) for found in latent.expand(stored, some))
        parts.append(_attend(layer, query[:, some], key, value, group, count).view(len(query), count, -1))
    return torch.cat(parts, 1).flatten(1)


def _by_head(found: Tensor, size: int) -> Tensor:
    """[B * M, K, D] -> [B * K * M, D]."""
    return found.reshape(size, -1, *found.shape[1:]).transpose(1, 2).flatten(0, 2)


def _make(parts: AttentionParts) -> StepAttention:
    tile = _LATENT_TILE if parts.needs.latent else _TILE
    return TorchAttention(parts.pool, parts.needs.shape.dtype, tile)


TORCH = AttentionBackend(
    Abilities(
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        cache_dtypes=frozenset({torch.float8_e4m3fn}),
        sinks=True,
        chunks=True,
    ),
    prefill=_make,
    decode=_make,
    shared=lambda parts: lambda batch: TorchSharedAttention(parts.pool, parts.needs.shape.dtype),
    shared_prompts=lambda parts: TorchSharedAttention(parts.pool, parts.needs.shape.dtype),
    reads_keys=False,
    latent=frozenset({"prefill", "decode"}),
)
