"""Paged attention by FlashInfer, on CUDA: each step is planned once for each kind of layer, and all its layers reuse the plan."""

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
from sapwood_kernels.float8_prefill import Float8PrefillAttention, WideningBuffer
from sapwood_kernels.split_decode_attention import MOST_SPLIT, SplitDecodeAttention
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer
from sapwood_worker.model.pools.device_pool import DevicePool, KVDestination

Attention = PrefillAttention | Float8PrefillAttention | DecodeAttention | SplitDecodeAttention | MixedAttention


def variant_of(layer: AttentionLayer) -> Variant:
    """The kind of a layer: layers of one kind share a plan."""
    return Variant(layer.scale, layer.window, layer.softcap)


def paged_keys(batch: AttentionBatch, page_size: int, indices: Tensor) -> PagedKeys:
    """The addresses of the batch's keys in FlashInfer's form; vectorised, O(pages).

    Args:
        batch: The step.
        page_size: Tokens in a page.
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
    """Implements ``AttentionPlan`` with whichever form of attention serves the step.

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

    def destination(self, layer: AttentionLayer) -> KVDestination:
        self._pool.await_layer(layer.index)
        return self._pool.destination(layer.index, self._cache_slots)

    def attend_cached(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        attention = self._attentions[variant_of(layer)]
        pool, index = self._pool, layer.index
        result = attention.run(query, pool.key_pages(index), pool.value_pages(index), pool.scales.of(index))
        return result.view(query.shape[0], -1)

    def attend_into(self, layer: AttentionLayer, query: Tensor, out: Tensor) -> None:
        """Like :meth:`attend_cached`, once the layer's cached pages have arrived; fills ``out`` [T, H, D]."""
        pool, index = self._pool, layer.index
        pool.await_layer(index)
        attention = self._attentions[variant_of(layer)]
        attention.run(query, pool.key_pages(index), pool.value_pages(index), pool.scales.of(index), out)


class FlashInferBackend:
    """Implements :class:`sapwood_worker.model.attention.backend.AttentionBackend`.

    Args:
        pool: Keys and values, of the shape's dtype or float8_e4m3fn.
        shape: What the layers share.
        kinds: The distinct kinds of layer.
        longest: Tokens of the longest request.
    """

    def __init__(self, pool: DevicePool, shape: AttentionShape, kinds: Sequence[Variant], longest: int) -> None:
        self._pool = pool
        self.shape = shape
        self.kinds = tuple(kinds)
        # Requests may share pages, so a step can name more pages than the pool has.
        self.indices = torch.zeros(4 * pool.num_pages, dtype=torch.int32, device=pool.device)
        self._float8 = pool.dtype != shape.dtype
        self._prefill: dict[Variant, PrefillAttention | Float8PrefillAttention]
        if self._float8:
            buffer = WideningBuffer(shape, longest, pool.key_pages(0))
            self._prefill = {kind: Float8PrefillAttention(shape, kind, buffer, pool.device) for kind in self.kinds}
        else:
            self._prefill = {kind: PrefillAttention(shape, kind, pool.device) for kind in self.kinds}
        workspace = DecodeAttention.workspace(pool.device)
        self._mixed = {
            kind: MixedAttention(self.decode_attention(None, workspace, kind), prefill)
            for kind, prefill in self._prefill.items()
        }
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin_plan(self) -> None:
        """Waits until the device has read the last plan's host buffers, which the next plan overwrites. It reads them before the
        step's computation, so a step may be planned while the device computes the one before."""
        self._planned.synchronize()

    def end_plan(self) -> None:
        """Notes that all copies of a plan have been queued on the device."""
        self._planned.record()

    def decode_attention(
        self, batch: int | None, workspace: Tensor, kind: Variant
    ) -> DecodeAttention | SplitDecodeAttention:
        """The attention of ``batch`` decodes at fixed addresses, or of any number, by the faster of two kernels."""
        if self._float8 or (batch is not None and batch <= MOST_SPLIT):
            return SplitDecodeAttention(batch, self.indices, self.shape, kind)
        return DecodeAttention(batch, self.indices, workspace, self.shape, kind)

    def plan(self, batch: AttentionBatch) -> FlashInferPlan:
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
