"""Decode attention by our own split kernel.

Microseconds for a layer on an H200, against FlashInfer's (8 key/value heads of 128): 6.9 against 10.9 for one request of 1100
keys, 16.1 against 19.5 for 8; for requests of 100 to 1948 keys 40 against 47 for 32 of them, 72 against 84 for 64, 137 against
157 for 128, and 247 against 255 for 256, where FlashInfer's plan balances long requests better. 256 requests over a float8 cache
take 190, over bfloat16 286, with FlashInfer's kernels for float8 295. It needs no plan on the host.
"""

from __future__ import annotations

import numpy as np
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
        shape: The shape that all layers share.
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
        self._numbers = torch.zeros(_second(batch or 0) + (batch or 0) + 1, dtype=torch.int32, device=ops.device)
        self._lengths, self._indptr = _halves(self._numbers, batch or 0)
        self._lengths.fill_(1)
        self._shared: SharedWork | None = None
        # Of programs that share requests; zeros between launches.
        self._flags = torch.zeros(ops.processors, dtype=torch.int32, device=ops.device)

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        indptr = keys.indptr.numpy()
        count = len(indptr) - 1
        numbers = np.zeros(_second(count) + count + 1, np.int32)
        numbers[:count] = (np.diff(indptr) - 1) * self._shape.page_size + keys.last_page_len.numpy()
        numbers[_second(count) :] = indptr
        if self._fixed:
            self._ops.fill(self._numbers, numbers)
        else:
            self._lengths, self._indptr = _halves(self._ops.to_device(numbers), count)

    def advance(self, by: int | Tensor) -> None:
        """Implements ``AdvancingAttention``."""
        self._lengths.add_(by)

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
            chunked=variant.chunked,
            softcap=variant.softcap,
            sinks=cache.sinks,
            kv_scales=cache.scales,
            shared=self._shared,
            out=out,
        )


def _second(count: int) -> int:
    """Where the page indices begin behind ``count`` lengths: kernels are compiled for addresses that 16 divides."""
    return -(-count // 4) * 4


def _halves(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Lengths and page indices in what one copy brings to the device."""
    return numbers[:count], numbers[_second(count) :]
