"""Prompts of latent layers (MLA), expanded: torch's flash attention over keys and values made of the cached vectors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.attention.cudnn_lengths import padded, prefers_cudnn, rounded, without_cudnn
from sapwood_kernels.attention.latent.cudnn import takes_narrow
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer, PromptOrder
from sapwood_worker.model.pools.device_pool import DevicePool

LEAST_PLANNED = 1024
"""Tokens from which on a whole prompt is computed by cuDNN, where torch prefers it, as it plans for each length. A layer of 16
heads of 192 took an H200 24 us by it and 45 by flash attention at 1024 tokens, 15 and 22 at 512, 71 and 147 at 2048."""
_EXPANDED = 1 << 27
"""Numbers of keys and values that are expanded at once."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request of T tokens that sees M keys.

    Attributes:
        tokens: The step's rows of its tokens.
        rows: int64 [M - common] on the device: the pool's rows of the keys after those in common.
        common: How many first keys it has in common with the one before.
    """

    tokens: slice
    rows: Tensor
    common: int


class LatentPrefill:
    """Implements ``StepAttention``, one request after the other: a prompt's work outweighs its launches. Keys and values that
    neighbours of ``batch.prompts`` have in common are made once and stay in place for the next.

    Args:
        pool: The vectors.
        ops: The device's operations.
    """

    def __init__(self, pool: DevicePool, ops: DeviceOps) -> None:
        self._pool, self._ops = pool, ops
        self._batch: AttentionBatch
        self._groups: list[list[_Prompt]] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._groups = batch, []

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        assert layer.latent is not None
        if not self._groups:  # all latent layers keep alike
            self._groups = self._find(layer.index)
        alone = len(self._groups) == len(self._groups[0]) == 1
        if out is None and not alone:
            out = layer.empty_result(query)
        for group in self._groups:
            stored = [self._pool.gather(layer.index, each.rows, query.dtype)[0] for each in group]
            found = _attend(layer, query, group, stored, out)
        return found

    def _find(self, layer: int) -> list[list[_Prompt]]:
        batch, size = self._batch, self._pool.page_size
        starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
        order = batch.prompts or PromptOrder(list(range(len(lengths))), [0] * len(lengths))
        groups: list[list[_Prompt]] = []
        for index, common in zip(order.order, order.common, strict=True):
            at = np.arange(common, lengths[index])
            slots = batch.page_table[index, at // size].astype(np.int64) * size + at % size
            rows = self._ops.to_device(np.ascontiguousarray(self._pool.rows(layer, slots[None]).ravel()))
            if not common:
                groups.append([])
            groups[-1].append(_Prompt(slice(starts[index], starts[index + 1]), rows, common))
        return groups


def _attend(
    layer: AttentionLayer, query: Tensor, group: list[_Prompt], stored: list[Tensor], out: Tensor | None
) -> Tensor:
    """Attends with the last tokens of each request of a group over the request's vectors.

    Args:
        layer: The layer's constants.
        query: [T, H, D]: of all requests of the step.
        group: The requests.
        stored: The vectors of each, but for those that it has in common with the request before it.
        out: [T, H, V]: gets the group's rows, and is returned; None: the group is one request with all of the rows.
    """
    from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, which other workers never need

    assert layer.latent is not None
    heads, dim = query.shape[1:]
    latent, value_dim = layer.latent, layer.latent.value_dim
    most = max(each.common + len(own) for each, own in zip(group, stored, strict=True))
    # By what a prompt is filled up to, as lengths that are to have the same plan must have as many heads at once.
    count = max(1, _EXPANDED // (rounded(most) * (dim + value_dim)))
    for start in range(0, heads, count):
        some = slice(start, min(start + count, heads))
        made: tuple[Tensor, Tensor] | None = None
        for each, own in zip(group, stored, strict=True):
            asked = query[each.tokens, some]
            tokens, length = len(asked), each.common + len(own)
            alone = tokens == length and prefers_cudnn(asked.device)
            planned = alone and tokens >= LEAST_PLANNED
            # Flash attention wants heads of one size.
            kind = asked.device, asked.dtype, asked.shape[1], dim, value_dim, LEAST_PLANNED
            narrow = planned and len(group) == 1 and takes_narrow(*kind)
            vectors = padded(own) if narrow else own
            key, value = latent.expand(vectors, some, wide=not narrow)
            if len(group) > 1:
                made = made or (key.new_empty(most, *key.shape[1:]), key.new_empty(most, *key.shape[1:]))
                for whole, part in zip(made, (key, value), strict=True):
                    whole[each.common : length] = part
                key, value = made[0][:length], made[1][:length]
            if planned:
                asked = padded(asked)
                key, value = (key, value) if narrow else (padded(key), padded(value))
            mask = causal_lower_right(len(asked), len(key))
            q, k, v = (part.transpose(0, 1)[None] for part in (asked, key, value))
            with without_cudnn() if alone and not planned else nullcontext():
                result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
            found = result[0].transpose(0, 1)[:tokens, :, :value_dim]
            if out is None and count >= heads:
                return found.contiguous()
            out = layer.empty_result(query) if out is None else out
            out[each.tokens, some] = found
    assert out is not None
    return out
