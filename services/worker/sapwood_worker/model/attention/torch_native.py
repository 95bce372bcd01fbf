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
from sapwood_kernels.attention.planned import IntArray, SharedRuns
from sapwood_kernels.native.products import NativeLibrary
from sapwood_kernels.native.steps import LANES, DecodeAttention
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import (
    Abilities,
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionParts,
    StepAttention,
)
from sapwood_worker.model.attention.paged import GroupedAttention
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.records.kv_layout import KVComponent

_TILE = 256
# Tiles of at least this many queries are computed alone: batching them gains nothing and costs padding.
_ALONE = 32
# Latent attention decompresses the keys of all positions of a tile: with a larger tile more queries share that work, but the
# mask is larger.
_LATENT_TILE = 1024
_EXPANDED = 1 << 26
"""Numbers of keys and values that are expanded at once."""


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
        reach = query_at if self._batch.reach is None else self._batch.reach[rows]
        hidden = key_at[:, None] > reach[..., None]
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
    end = position + queries if batch.reach is None else np.maximum.reduceat(batch.reach, row) + 1
    return _Tiles(request, row, queries, position, key, end - key)


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
    # Query heads that share a key head become additional queries of it, so keys are not repeated.
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
    # Some heads at a time: a long prompt's expanded keys are many times larger than its cached vectors.
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


# Attention of decodes on a CPU, compiled from C: it reads keys and values directly in the cache.


class NativeAttention:
    """Implements ``StepAttention`` for one token of each request.

    Args:
        pool: Keys and values.
        library: The compiled library.

    Attributes:
        pages: The planned requests' pages, int32 [T, P]; rows may lie apart.
        lengths: How many keys each has.
    """

    def __init__(self, pool: DevicePool, library: NativeLibrary) -> None:
        self._pool = pool
        self._library = library
        self._layers: dict[int, DecodeAttention] = {}
        self.pages: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
        self.lengths: np.ndarray[tuple[int, ...], np.dtype[np.int64]]

    def plan(self, batch: AttentionBatch) -> None:
        self.pages = batch.page_table if batch.page_table.strides[1] == 4 else np.ascontiguousarray(batch.page_table)
        self.lengths = np.ascontiguousarray(batch.seq_lens)

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        attention = self._layers.get(layer.index)
        if attention is None:
            attention = self._layers[layer.index] = self._make_native(layer, query.shape[1])
        result = layer.empty_result(query) if out is None else out
        attention(query.contiguous(), self.pages, self.lengths, result)
        return result

    def _make_native(self, layer: AttentionLayer, heads: int) -> DecodeAttention:
        keys, values = self._pool.key_pages(layer.index), self._pool.value_pages(layer.index)
        constants = layer.scale, layer.window, layer.chunked, layer.softcap, layer.sinks
        return DecodeAttention(self._library, keys, values, heads, *constants)


def native_parts(attention: StepAttention) -> list[NativeAttention] | None:
    """The attention of each page table that layers use, if all of them use native attention."""
    parts = attention.parts if isinstance(attention, GroupedAttention) else [attention]
    found = [part for part in parts if isinstance(part, NativeAttention)]
    return found if len(found) == len(parts) else None


def _library(ops: DeviceOps) -> NativeLibrary | None:
    return ops.native if isinstance(ops, CpuOps) else None


def _unfit(ops: DeviceOps) -> str | None:
    return None if _library(ops) is not None else "it runs on a CPU, and nothing was compiled for this one"


def _make_native(parts: AttentionParts) -> StepAttention:
    library = _library(parts.ops)
    assert library is not None
    return NativeAttention(parts.pool, library)


NATIVE = AttentionBackend(
    Abilities(
        dtypes=frozenset({torch.float32}),
        head_dims=frozenset(range(LANES, 513, LANES)),
        sinks=True,
        chunks=True,
        device=_unfit,
    ),
    decode=_make_native,
    shared=lambda parts: lambda batch: TorchSharedAttention(parts.pool, parts.needs.shape.dtype),
    reads_keys=False,
)


# Attention in plain torch, for any device, that reads shared keys once for all requests: the reference of
# ``sapwood_kernels.attention.shared.triton_shared`` and ``shared.prefill``, and what a CPU uses.
# A part of the result is computed for each shared run, with the queries of all its requests as rows of one product, and one
# part for each request's own keys. The parts are added, each weighted by its sum of weights (log-sum-exp), which is exact except
# for rounding.


"""The most tokens whose products with a stretch of keys are kept at once."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the results of N tokens.

    Attributes:
        rows: int64 [N]: the tokens.
        keys: int64 [B * K * M]: the pool's rows of B stretches of M keys, each shared by N / B tokens.
        mask: [B, 1, N / B, M]: 0 where a token sees a key, else -inf; None: it sees all.
        size: B.
    """

    rows: Tensor
    keys: Tensor
    mask: Tensor | None
    size: int


class TorchSharedAttention:
    """Implements :class:`sapwood_worker.model.attention.backend.StepAttention` for requests that share keys (``batch.runs``) and
    whose tokens see all shared keys. It suits few tokens for each request.

    Args:
        pool: Keys and values.
        dtype: The dtype of the queries.
    """

    def __init__(self, pool: DevicePool, dtype: torch.dtype) -> None:
        self._pool = pool
        self._dtype = dtype
        self._batch: AttentionBatch
        self._parts: dict[tuple[int | None, bool, KVComponent], list[_Part]] = {}

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._parts = {}

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        kind = layer.window, layer.chunked, self._pool.kept[layer.index]
        if kind not in self._parts:
            self._parts[kind] = self._cut(layer)
        latent = layer.latent
        asked = query if latent is None else latent.absorb(query)
        width = asked.shape[2] if latent is None else latent.rank
        # The running result: the highest score, and the sums of weights and of values relative to it.
        highest = asked.new_full(asked.shape[:2], float("-inf"), dtype=torch.float32)
        total = torch.zeros_like(highest)
        result = highest.new_zeros(*asked.shape[:2], width)
        if layer.sinks is not None:  # a key without a value
            highest, total = highest.copy_(layer.sinks), total + 1.0
        for part in self._parts[kind]:
            own, count, values = _attend_shared(self._pool, layer, asked.index_select(0, part.rows), part, width)
            before = highest.index_select(0, part.rows)
            above = torch.maximum(before, own)
            base = above.clamp(min=torch.finfo(torch.float32).min)  # nothing seen yet
            fade, weight = (before - base).exp(), (own - base).exp()
            highest.index_copy_(0, part.rows, above)
            total.index_copy_(0, part.rows, total.index_select(0, part.rows) * fade + count * weight)
            summed = result.index_select(0, part.rows) * fade[..., None] + values * weight[..., None]
            result.index_copy_(0, part.rows, summed)
        found = (result / total[..., None]).to(query.dtype)
        if latent is not None:
            found = latent.values(found).contiguous()
        return found if out is None else out.copy_(found)

    def _cut(self, layer: AttentionLayer) -> list[_Part]:
        batch = self._batch
        rows, lengths = batch.query_starts, batch.seq_lens
        tokens = np.diff(rows)
        position = _stretches(lengths - tokens, lengths)
        reach = layer.oldest_seen(position)
        oldest = reach[rows[:-1]]  # pages that a request's first token does not see may be gone
        starts = np.zeros_like(lengths)
        parts = []
        runs = batch.runs or SharedRuns(*np.zeros((5, 0), np.int64))
        for first, count, begin, end in zip(runs.first, runs.count, runs.begin, runs.end, strict=True):
            members = runs.order[first : first + count]
            starts[members] = end
            begin = max(int(begin), int(oldest[members].min()))
            if begin < end:
                at = np.arange(begin, int(end))[None]
                every = _tiles(_stretches(rows[members], rows[members + 1]))
                parts += [self._part(layer, some, members[:1], at, _before(at, reach[some])) for some in every]
        # Requests with one token are grouped by about the same number of own keys.
        begins = np.maximum(starts, oldest)
        counts = lengths - begins
        kinds = np.where(tokens == 1, np.ceil(np.log2(counts)).astype(np.int64), -1)
        for kind in np.unique(kinds[tokens == 1]):
            members = np.flatnonzero(kinds == kind)
            nth = np.arange(int(counts[members].max()))[None]
            at = begins[members][:, None] + np.minimum(nth, counts[members][:, None] - 1)
            hidden = nth >= counts[members][:, None]
            parts.append(self._part(layer, rows[members], members, at, hidden[:, None]))
        for member in np.flatnonzero(tokens > 1):
            for some in _tiles(np.arange(rows[member], rows[member + 1])):
                at = np.arange(begins[member], position[some[-1]] + 1)[None]
                hidden = (at > position[some][:, None])[None] | _before(at, reach[some])
                parts.append(self._part(layer, some, np.array([member]), at, hidden))
        return parts

    def _part(
        self,
        layer: AttentionLayer,
        rows: IntArray,
        pages_of: IntArray,
        at: IntArray,
        hidden: npt.NDArray[np.bool_],
    ) -> _Part:
        """The part of some tokens over keys ``at``, int64 [B, M], of B requests; ``hidden`` is [B, N / B, M]."""
        size = self._pool.page_size
        pages = self._batch.page_table[pages_of[:, None], at // size]
        slots = pages.astype(np.int64) * size + at % size
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None]
        return _Part(
            rows=self._tensor(rows),
            keys=self._tensor(self._pool.rows(layer.index, slots).ravel()),
            mask=None if mask is None else mask.to(self._pool.device),
            size=len(pages_of),
        )

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._pool.device)


def _stretches(begins: IntArray, ends: IntArray) -> IntArray:
    """The integers from each begin up to its end, one range after the other."""
    return np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])


def _tiles(rows: IntArray) -> list[IntArray]:
    """Yields the rows in batches of the size that is computed at once."""
    return np.array_split(rows, -(-len(rows) // _TILE))


def _before(at: IntArray, reach: IntArray) -> npt.NDArray[np.bool_]:
    """[1, N, M]: whether each of M keys lies before the first that each of N tokens sees."""
    return (at < reach[:, None])[None]


def _attend_shared(
    pool: DevicePool, layer: AttentionLayer, query: Tensor, part: _Part, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The partial result of queries [N, H, D]: the highest score and the sum of weights, float32 [N, H], and the sum of weighted
    values [N, H, width]."""
    keys, values = pool.gather(layer.index, part.keys, query.dtype)
    kv_heads = pool.kept[layer.index].heads
    count, heads, dim = query.shape
    sharers, group = count // part.size, heads // kv_heads
    # [B, K, sharers * group, D]; keys and values [B, K, M, D].
    stacked = query.view(part.size, sharers, kv_heads, group, dim).transpose(1, 2).reshape(part.size, kv_heads, -1, dim)
    keys = keys.view(part.size, kv_heads, -1, keys.shape[1])
    values = values.view(part.size, kv_heads, -1, values.shape[1])[..., :width]
    scores = torch.matmul(stacked, keys.transpose(2, 3)).float().mul_(layer.scale)
    if layer.softcap is not None:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if part.mask is not None:
        scores.view(part.size, kv_heads, sharers, group, -1).add_(part.mask[:, :, :, None])
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest.clamp(min=torch.finfo(torch.float32).min)).exp_()
    summed = torch.matmul(weights.to(query.dtype), values).float()

    def by_request(found: Tensor) -> Tensor:
        return found.view(part.size, kv_heads, sharers, group, -1).transpose(1, 2).reshape(count, heads, -1)

    return by_request(highest)[..., 0], by_request(weights.sum(-1, keepdim=True))[..., 0], by_request(summed)
