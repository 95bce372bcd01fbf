"""Attention in plain torch that reads what requests share once for all of them, for any device: the reference of
``sapwood_kernels.attention.shared.triton_shared`` and ``shared.prefill``, and what a CPU uses.

A part of the result is computed for each shared run, with the queries of all who share it as rows of one product, and one for
each request's own keys. The parts are added, each weighted by its sum of weights (log-sum-exp), which is exact but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.attention.planned import IntArray, SharedRuns
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.records.kv_layout import KVComponent

_TILE = 256
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
    """Implements :class:`sapwood_worker.model.attention.backend.StepAttention` where requests share keys, all of which their
    tokens see: ``batch.runs``. Made for few tokens of each.

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
        # What is found so far: the highest score, the sum of weights and of values relative to it.
        highest = asked.new_full(asked.shape[:2], float("-inf"), dtype=torch.float32)
        total = torch.zeros_like(highest)
        result = highest.new_zeros(*asked.shape[:2], width)
        if layer.sinks is not None:  # a key without a value
            highest, total = highest.copy_(layer.sinks), total + 1.0
        for part in self._parts[kind]:
            own, count, values = _attend(self._pool, layer, asked.index_select(0, part.rows), part, width)
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
        # Requests with one token and about as many keys of their own go together.
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
    """The numbers from each beginning up to its end, one stretch after the other."""
    return np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])


def _tiles(rows: IntArray) -> list[IntArray]:
    """The rows, as many at a time as are computed at once."""
    return np.array_split(rows, -(-len(rows) // _TILE))


def _before(at: IntArray, reach: IntArray) -> npt.NDArray[np.bool_]:
    """[1, N, M]: whether each of M keys lies before the first that each of N tokens sees."""
    return (at < reach[:, None])[None]


def _attend(
    pool: DevicePool, layer: AttentionLayer, query: Tensor, part: _Part, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What queries [N, H, D] find: highest score and sum of weights, float32 [N, H], and sum of weighted values [N, H, width]."""
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
