"""Prompts of latent layers (MLA), expanded: torch's flash attention over keys and values made of the cached vectors."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.attention.latent import LatentHeads
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer
from sapwood_worker.model.pools.device_pool import DevicePool

_EXPANDED = 1 << 27
"""Numbers of keys and values that are expanded at once."""


class LatentPrefill:
    """Implements ``StepAttention``, one request after the other: a prompt's work outweighs its launches.

    Args:
        pool: The vectors.
        ops: The device's operations.
    """

    def __init__(self, pool: DevicePool, ops: DeviceOps) -> None:
        self._pool, self._ops = pool, ops
        self._batch: AttentionBatch
        # Each request's tokens, and the rows of the pool that they see.
        self._requests: list[tuple[slice, Tensor]] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._requests = batch, []

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        assert layer.latent is not None
        result = layer.empty_result(query) if out is None else out
        if not self._requests:  # all latent layers keep alike
            self._requests = self._find(layer.index)
        for tokens, rows in self._requests:
            stored, _ = self._pool.gather(layer.index, rows, query.dtype)
            _attend(layer.latent, layer.scale, query[tokens], stored, result[tokens])
        return result

    def _find(self, layer: int) -> list[tuple[slice, Tensor]]:
        starts, size = self._batch.query_starts.tolist(), self._pool.page_size
        found = []
        for index, length in enumerate(self._batch.seq_lens.tolist()):
            at = np.arange(length)
            slots = self._batch.page_table[index, at // size].astype(np.int64) * size + at % size
            rows = self._pool.rows(layer, slots[None]).ravel()
            found.append((slice(starts[index], starts[index + 1]), self._ops.to_device(np.ascontiguousarray(rows))))
        return found


def _attend(latent: LatentHeads, scale: float, query: Tensor, stored: Tensor, out: Tensor) -> None:
    """The last T of M positions, [T, H, D], over their vectors [M, R + E]; fills ``out`` [T, H, V]."""
    from torch.nn.attention.bias import (
        causal_lower_right,
    )  # this brings torch's compiler, which other workers never need

    heads, dim = query.shape[1:]
    mask = causal_lower_right(len(query), len(stored))
    each = max(1, _EXPANDED // (len(stored) * (dim + latent.value_dim)))
    for start in range(0, heads, each):
        some = slice(start, min(start + each, heads))
        key, value = latent.expand(stored, some)
        # Flash attention wants heads of one size.
        values = F.pad(value, (0, dim - latent.value_dim))
        q, k, v = (part.transpose(0, 1)[None] for part in (query[:, some], key, values))
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out[:, some] = result[0].transpose(0, 1)[..., : latent.value_dim]
