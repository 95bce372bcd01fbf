"""Attention in which a token's result does not depend, to the bit, on what is computed beside it: neither on other requests of a
step, nor on how many tokens of its own prompt are computed with it.

Prompts and decodes go through the same kernel with tiles of the same size, and no request's keys are shared out to several
programs: a batch of few long requests does not fill a chip.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant
from sapwood_kernels.attention.triton_prefill import AlikeTile, cut_tiles, prefill_attention
from sapwood_kernels.ops.device import DeviceOps

_ROWS = 64
"""Rows of a tile: the fewest for the matrix units' instruction that computes many, so that decodes read keys and wait for little
else."""
_BLOCKS = {16: (64, 5), 32: (32, 4)}
"""Bits of a number -> keys of a block and stages, for heads of up to 128 elements; wider ones have blocks of 32 keys."""


def alike_tile(group: int, dim: int, dtype: torch.dtype) -> AlikeTile:
    """The tile of all tokens of a model.

    Args:
        group: Query heads that share a key/value head.
        dim: Elements of a head.
        dtype: The queries' dtype.
    """
    keys, stages = _BLOCKS[8 * dtype.itemsize]
    rows = max(_ROWS, int(triton.next_power_of_2(group)))
    return AlikeTile(rows, keys, stages) if dim <= 128 else AlikeTile(rows, 32, 3)


class FixedOrderAttention:
    """Implements :class:`sapwood_kernels.attention.planned.PlannedAttention` for any ragged batch, or for one token of each of a
    number of requests; then it can be captured in a CUDA graph.

    Args:
        batch: The number of requests, with one token each, whose buffers keep their addresses; None: any batch.
        indices: int32 buffer of page ids that all batches share.
        shape: The shape that all layers share.
        variant: The kind of layer.
        ops: The device's operations.
        tile: What a program takes; None: as :func:`alike_tile` says.
    """

    def __init__(
        self,
        batch: int | None,
        indices: Tensor,
        shape: AttentionShape,
        variant: Variant,
        ops: DeviceOps,
        tile: AlikeTile | None = None,
    ) -> None:
        self._pages, self._shape, self._variant, self._ops = indices, shape, variant, ops
        group = shape.num_heads // shape.num_kv_heads
        self._tile = tile or alike_tile(group, shape.head_dim, shape.dtype)
        self._tokens = self._tile.rows // group
        self._fixed = batch is not None
        self._tiles = self._starts = self._indptr = self._lengths = torch.zeros(0, dtype=torch.int32)
        if batch is not None:
            each = np.arange(batch, dtype=np.int32)
            self._tiles = ops.to_device(np.stack((each, np.zeros_like(each)), 1))
            self._starts = ops.to_device(np.arange(batch + 1, dtype=np.int32))
            self._indptr = torch.zeros(batch + 1, dtype=torch.int32, device=ops.device)
            self._lengths = torch.ones(batch, dtype=torch.int32, device=ops.device)

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        """As :meth:`PlannedAttention.plan`."""
        lengths = keys.lengths(self._shape.page_size).numpy()
        indptr = keys.indptr.numpy()
        if self._fixed:
            self._ops.fill(self._lengths, lengths.astype(np.int32))
            self._ops.fill(self._indptr, indptr)
            return
        tiles = cut_tiles(query_indptr.diff().numpy(), lengths, self._tokens)
        put = self._ops.to_device
        self._tiles, self._starts = put(tiles), put(query_indptr.numpy())
        self._indptr, self._lengths, self._pages = put(indptr), put(lengths), keys.indices

    def advance(self, by: int | Tensor) -> None:
        """Implements ``AdvancingAttention``."""
        self._lengths.add_(by)

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        """As :meth:`PlannedAttention.run`."""
        variant = self._variant
        return prefill_attention(
            query, cache.keys, cache.values, self._tiles, self._starts, self._indptr, self._pages, self._lengths,
            scale=variant.scale, window=variant.window, chunked=variant.chunked, softcap=variant.softcap, sinks=cache.sinks,
            kv_scales=cache.scales, out=out, alike=self._tile,
        )  # fmt: skip
