"""Decode attention by our own split kernel.

Microseconds for a layer on an H200, against FlashInfer's (8 key/value heads of 128): 6.9 against 10.9 for one request of 1100
keys, 16.1 against 19.5 for 8; for requests of 100 to 1948 keys 40 against 47 for 32 of them, 72 against 84 for 64, 137 against
157 for 128, and 247 against 255 for 256, where FlashInfer's plan balances long requests better. 256 requests over a float8 cache
take 190, over bfloat16 286, with FlashInfer's kernels for float8 295. It needs no plan on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant
from sapwood_kernels.attention.triton_decode import SharedWork, decode_attention, num_splits
from sapwood_kernels.ops.device import DeviceOps

MOST_SPLIT = 128
"""The largest batch for which it is used over a cache of the queries' dtype."""


class SplitDecodeAttention:
    """Implements ``PlannedAttention`` for one token of each request; can be captured in a CUDA graph if their number is fixed.

    Args:
        batch: The number of requests, whose buffers keep their addresses; None: any number, with new buffers in each step.
        indices: int32 buffer of page ids that all batch sizes share.
        shape: What all layers share.
        variant: The kind of layer.
        ops: The device's operations.
    """

    def __init__(
        self, batch: int | None, indices: Tensor, shape: AttentionShape, variant: Variant, ops: DeviceOps
    ) -> None:
        self._indices = indices
        self._shape = shape
        self._variant = variant
        self._fixed = batch is not None
        self._ops = ops
        self._indptr = torch.zeros((batch or 0) + 1, dtype=torch.int32, device=ops.device)
        self._lengths = torch.ones(batch or 0, dtype=torch.int32, device=ops.device)
        self._shared: SharedWork | None = None

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        indptr, lengths = keys.indptr.numpy(), keys.lengths(self._shape.page_size).numpy()
        if self._fixed:
            self._ops.fill(self._indptr, indptr)
            self._ops.fill(self._lengths, lengths)
        else:
            self._indptr, self._lengths = self._ops.to_device(indptr), self._ops.to_device(lengths)

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        variant = self._variant
        float8 = cache.keys.dtype == torch.float8_e4m3fn
        splits, least = num_splits(len(self._lengths), self._shape.num_kv_heads, self._ops.processors, float8=float8)
        return decode_attention(
            query,
            cache.keys,
            cache.values,
            self._indptr,
            self._indices,
            self._lengths,
            splits=splits,
            least=least,
            scale=variant.scale,
            window=variant.window,
            softcap=variant.softcap,
            sinks=cache.sinks,
            kv_scales=cache.scales,
            shared=self._shared,
            out=out,
        )
