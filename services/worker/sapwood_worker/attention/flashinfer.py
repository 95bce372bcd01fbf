"""Paged attention by FlashInfer, on CUDA: planned once a step for each distinct kind of layer, then reused by all its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.flashinfer_attention import (
    AttentionShape,
    DecodeAttention,
    MixedAttention,
    PagedKeys,
    PrefillAttention,
    Variant,
)
from sapwood_kernels.split_decode_attention import MOST_SPLIT, SplitDecodeAttention
from sapwood_worker.attention.backend import AttentionBatch, AttentionLayer
from sapwood_worker.cache.device_pool import DevicePool

Destination = tuple[Tensor, Tensor, Tensor]
Attention = PrefillAttention | DecodeAttention | SplitDecodeAttention | MixedAttention


def variant_of(layer: AttentionLayer) -> Variant:
    """The kind of a layer: layers of one kind share a plan."""
    return Variant(layer.scale, layer.window, layer.softcap)


def paged_keys(batch: AttentionBatch, page_size: int, indices: Tensor) -> PagedKeys:
    """Where the batch's keys are, as FlashInfer takes it; vectorised, O(pages).

    Args:
        batch: The step.
        page_size: Tokens a page.
        indices: int32 device buffer that the page ids are written to.
    """
    counts = -(-batch.seq_lens // page_size)
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    used = np.arange(batch.page_table.shape[1])[None] < counts[:, None]
    pages = torch.from_numpy(batch.page_table[used]).pin_memory()
    indices[: len(pages)].copy_(pages, non_blocking=True)
    last = (batch.seq_lens - (counts - 1) * page_size).astype(np.int32)
    return PagedKeys(torch.from_numpy(indptr), indices[: len(pages)], torch.from_numpy(last))


class FlashInferPlan:
    """A planned step, in whichever form of attention serves it.

    Args:
        pool: Keys and values.
        attentions: The planned attention of each kind of layer.
        cache_slots: int64 [T] on the device.
    """

    def __init__(
        self,
        pool: DevicePool,
        attentions: Mapping[Variant, Attention],
        cache_slots: Tensor,
    ) -> None:
        self._pool = pool
        self._attentions = attentions
        self._cache_slots = cache_slots

    def destination(self, layer: AttentionLayer) -> Destination:
        """See :class:`sapwood_worker.attention.backend.AttentionPlan`."""
        self._pool.await_layer(layer.index)
        return self._pool.key_slots[layer.index], self._pool.value_slots[layer.index], self._cache_slots

    def attend_cached(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """See :class:`sapwood_worker.attention.backend.AttentionPlan`."""
        attention = self._attentions[variant_of(layer)]
        result = attention.run(query, self._pool.key_pages(layer.index), self._pool.value_pages(layer.index))
        return result.view(query.shape[0], -1)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`sapwood_worker.attention.backend.AttentionPlan`."""
        keys, values, slots = self.destination(layer)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return self.attend_cached(layer, query.contiguous())


class FlashInferBackend:
    """Implements :class:`sapwood_worker.attention.backend.AttentionBackend`.

    Args:
        pool: Keys and values.
        shape: What the layers share.
        kinds: The distinct kinds of layer.
    """

    def __init__(self, pool: DevicePool, shape: AttentionShape, kinds: Sequence[Variant]) -> None:
        self._pool = pool
        self.shape = shape
        self.kinds = tuple(kinds)
        # Requests may share pages, so a step can name more pages than the pool has: room for that.
        self.indices = torch.zeros(4 * pool.num_pages, dtype=torch.int32, device=pool.device)
        self._prefill = {kind: PrefillAttention(shape, kind, pool.device) for kind in self.kinds}
        workspace = DecodeAttention.workspace(pool.device)
        self._mixed = {
            kind: MixedAttention(DecodeAttention(None, self.indices, workspace, shape, kind), prefill)
            for kind, prefill in self._prefill.items()
        }

        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin_plan(self) -> None:
        """Waits until the last plan's host buffers, which the next will write to, have been read. That is before its step's
        computation: a step may be planned while the device is at the one before."""
        self._planned.synchronize()

    def end_plan(self) -> None:
        """All copies of a plan have been asked for."""
        self._planned.record()

    def decode_attention(self, batch: int, workspace: Tensor, kind: Variant) -> DecodeAttention | SplitDecodeAttention:
        """The attention of ``batch`` decodes at fixed addresses, by the faster of two kernels."""
        if batch <= MOST_SPLIT:
            return SplitDecodeAttention(batch, self.indices, self.shape, kind)
        return DecodeAttention(batch, self.indices, workspace, self.shape, kind)

    def plan(self, batch: AttentionBatch) -> FlashInferPlan:
        """See :class:`AttentionBackend`."""
        self.begin_plan()
        plan = self._plan(batch)
        self.end_plan()
        return plan

    def _plan(self, batch: AttentionBatch) -> FlashInferPlan:
        keys = paged_keys(batch, self._pool.page_size, self.indices)
        query_indptr = torch.from_numpy(batch.query_starts.astype(np.int32))
        longer = np.flatnonzero(np.diff(batch.query_starts) > 1)
        decodes = int(longer[0]) if len(longer) else 0
        if decodes:
            for mixed in self._mixed.values():
                mixed.plan(query_indptr, keys, decodes)
            return FlashInferPlan(self._pool, self._mixed, batch.cache_slots)
        for prefill in self._prefill.values():
            prefill.plan(query_indptr, keys)
        return FlashInferPlan(self._pool, self._prefill, batch.cache_slots)
