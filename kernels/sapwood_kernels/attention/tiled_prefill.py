"""Attention of prompts by our own kernel, for GPUs without FlashInfer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant
from sapwood_kernels.attention.triton_prefill import cut_tiles, prefill_attention, tile_tokens
from sapwood_kernels.ops.device import DeviceOps


class TiledPrefillAttention:
    """Implements :class:`sapwood_kernels.attention.planned.PlannedAttention` for any ragged batch.

    Args:
        shape: The shape that all layers share.
        variant: The kind of layer.
        ops: The device's operations.
        causal: Whether the tokens are the last of their request; else all of them see all of its keys.
    """

    def __init__(self, shape: AttentionShape, variant: Variant, ops: DeviceOps, *, causal: bool = True) -> None:
        self._shape, self._variant, self._ops, self._causal = shape, variant, ops, causal
        self._tile = tile_tokens(shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.dtype)
        self._step: tuple[Tensor, ...] = ()

    def plan(self, query_indptr: Tensor, keys: PagedKeys, leaving_out: npt.NDArray[np.bool_] | None = None) -> None:
        """As :meth:`PlannedAttention.plan`.

        Args:
            query_indptr, keys: The same.
            leaving_out: bool [B]: requests that :meth:`run` computes nothing of, but not all of them.
        """
        lengths, counts = keys.lengths(self._shape.page_size), query_indptr.diff().numpy()
        if leaving_out is not None:
            counts = np.where(leaving_out, 0, counts)
        tiles = cut_tiles(counts, lengths.numpy(), self._tile)
        starts, indptr, sizes = (self._ops.to_device(each.numpy()) for each in (query_indptr, keys.indptr, lengths))
        self._step = self._ops.to_device(tiles), starts, indptr, keys.indices, sizes

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None, sums: Tensor | None = None) -> Tensor:
        variant = self._variant
        return prefill_attention(
            query,
            cache.keys,
            cache.values,
            *self._step,
            scale=variant.scale,
            window=variant.window,
            chunked=variant.chunked,
            softcap=variant.softcap,
            sinks=cache.sinks if self._causal else None,  # they are seen once
            kv_scales=cache.scales,
            out=out,
            causal=self._causal,
            sums=sums,
        )
