"""Decode attention of latent layers by our own kernels: each request for itself, or with what requests share read once.

Many requests go by ``triton_stream``: for 256 requests of 1024 vectors and 16 heads it takes an H200 83 us a layer, where
``triton_decode`` takes 111 and reading the vectors 70 at 4.3 TB/s; for 64 of 1041 it takes 29 for 39, reading 18.
"""

from __future__ import annotations

from torch import Tensor

from sapwood_kernels.attention.latent import triton_merge_values, triton_stream
from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_kernels.attention.latent.triton_decode import latent_decode
from sapwood_kernels.attention.latent.triton_shared import HEADS_OF_BLOCK, tile_requests
from sapwood_kernels.attention.planned import StoredPages
from sapwood_kernels.attention.shared_decode import SharedDecodeAttention
from sapwood_kernels.attention.split_decode import SplitDecodeAttention
from sapwood_kernels.attention.triton_decode import num_splits


class LatentDecodeAttention(SplitDecodeAttention):
    """Implements ``PlannedAttention`` for absorbed queries [T, H, R + E] of one token for each request, and gives [T, H, R]: the
    values of the cache it is given are the first R numbers of its keys. Planned as :class:`SplitDecodeAttention`."""

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        result = self._attend(query, cache, None)
        return result if out is None else out.copy_(result)

    def values(self, query: Tensor, cache: StoredPages, heads: LatentHeads) -> Tensor:
        """``heads.values`` of what :meth:`run` gives: [T, H, V]."""
        return self._attend(query, cache, heads)

    def _attend(self, query: Tensor, cache: StoredPages, heads: LatentHeads | None) -> Tensor:
        rank = cache.values.shape[3]
        if self._shared is None and triton_stream.serves(query, cache.keys, rank):
            flags, scale = self._flags[: self._ops.processors], self._variant.scale
            result = triton_stream.latent_stream(
                query, cache.keys, rank, self._indptr, self._indices, self._lengths, flags, scale=scale
            )
            return result if heads is None else heads.values(result)
        joined = heads is not None and query.shape[0] * query.shape[1] <= triton_merge_values.MOST
        splits, least = num_splits(len(self._lengths), _blocks(self._shape.num_heads), self._ops.processors)
        result = latent_decode(
            query,
            cache.keys,
            rank,
            self._indptr,
            self._indices,
            self._lengths,
            splits=splits,
            least=least,
            scale=self._variant.scale,
            kv_scale=cache.scales[0],
            shared=self._shared,
            values_by=(heads.up, heads.nope) if heads is not None and joined else None,
        )
        return result if heads is None or joined else heads.values(result)


class SharedLatentDecodeAttention(LatentDecodeAttention, SharedDecodeAttention):
    """The same where requests share keys, planned as :class:`SharedDecodeAttention`."""

    def _tile(self, batch: int) -> tuple[int, int]:
        return tile_requests(self._ops.device), _blocks(self._shape.num_heads)


def _blocks(heads: int) -> int:
    return -(-heads // HEADS_OF_BLOCK)
