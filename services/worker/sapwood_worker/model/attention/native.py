"""Attention of decodes on a CPU, compiled from C: it reads keys and values where the cache has them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.native.library import NativeLibrary
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
from sapwood_worker.model.attention.torch_shared import TorchSharedAttention
from sapwood_worker.model.pools.device_pool import DevicePool


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
            attention = self._layers[layer.index] = self._make(layer, query.shape[1])
        result = layer.empty_result(query) if out is None else out
        attention(query.contiguous(), self.pages, self.lengths, result)
        return result

    def _make(self, layer: AttentionLayer, heads: int) -> DecodeAttention:
        keys, values = self._pool.key_pages(layer.index), self._pool.value_pages(layer.index)
        constants = layer.scale, layer.window, layer.chunked, layer.softcap, layer.sinks
        return DecodeAttention(self._library, keys, values, heads, *constants)


def native_parts(attention: StepAttention) -> list[NativeAttention] | None:
    """The attention of each page table that layers use, if all of it is native."""
    parts = attention.parts if isinstance(attention, GroupedAttention) else [attention]
    found = [part for part in parts if isinstance(part, NativeAttention)]
    return found if len(found) == len(parts) else None


def _library(ops: DeviceOps) -> NativeLibrary | None:
    return ops.native if isinstance(ops, CpuOps) else None


def _unfit(ops: DeviceOps) -> str | None:
    return None if _library(ops) is not None else "it runs on a CPU, and nothing was compiled for this one"


def _make(parts: AttentionParts) -> StepAttention:
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
    decode=_make,
    shared=lambda parts: lambda batch: TorchSharedAttention(parts.pool, parts.needs.shape.dtype),
    reads_keys=False,
)
