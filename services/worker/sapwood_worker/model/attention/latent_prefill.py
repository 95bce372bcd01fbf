"""Prefill of latent layers (MLA): expands cached vectors to keys and values, and calls torch's flash attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.attention.cudnn_lengths import padded, prefers_cudnn, rounded, without_cudnn
from sapwood_kernels.attention.latent.cudnn import takes_narrow
from sapwood_kernels.attention.latent.ragged import Ragged, ragged_attention, serves
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer, PromptOrder
from sapwood_worker.model.pools.device_pool import DevicePool

LEAST_PLANNED = 1024
"""The least number of tokens of an unchunked prompt that cuDNN computes, where torch prefers cuDNN, which plans for each length.
A layer of 16 heads of 192 took an H200 24 us by it and 45 by flash attention at 1024 tokens, 15 and 22 at 512, 71 and 147 at
2048."""
_EXPANDED = 1 << 27
"""Numbers of keys and values that are expanded at once."""
_GATHERED = 16384
"""The most keys of short requests (below ``LEAST_PLANNED``, and on a GPU also chunks) that are expanded at once."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request of T tokens that sees M keys.

    Attributes:
        tokens: The step's rows of its tokens.
        keys: M.
        common: How many first keys it shares with the request before.
    """

    tokens: slice
    keys: int
    common: int

    @property
    def count(self) -> int:
        """T."""
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests whose keys are expanded together.

    Attributes:
        prompts: The requests. Either each shares keys with the one before, or none does and all are short or chunks.
        rows: For each request, int64 [M - common] on the device: the pool's rows of its keys after the common ones; for short
            requests a single tensor, one request after the other.
        together: The place of each short request's rows, if one launch attends to all of them, side by side in the step; else
            None.
    """

    prompts: list[_Prompt]
    rows: list[Tensor]
    together: Ragged | None = None


class LatentPrefill:
    """Implements ``StepAttention``. Long prompts are computed one after the other, because their work outweighs their launches.
    Keys and values of short prompts are expanded together, and on a GPU one launch attends to all of them and to chunks. Keys
    that neighbours in ``batch.prompts`` share are expanded once and stay in place for the next.

    Args:
        pool: The vectors.
        ops: The device's operations.
    """

    def __init__(self, pool: DevicePool, ops: DeviceOps) -> None:
        self._pool, self._ops = pool, ops
        self._batch: AttentionBatch
        self._groups: list[_Group] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._groups = batch, []

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        assert layer.latent is not None
        if not self._groups:  # all latent layers keep the same shape
            self._groups = self._find(layer.index, launched=serves(query))
        alone = len(self._groups) == len(self._groups[0].prompts) == 1
        if out is None and not alone:
            out = layer.empty_result(query)
        for group in self._groups:
            stored = [self._pool.gather(layer.index, rows, query.dtype)[0] for rows in group.rows]
            if len(stored) == len(group.prompts) and group.together is None:
                found = _attend(layer, query, group.prompts, stored, out)
            else:
                assert out is not None
                found = _attend_short(layer, query, group, stored[0], out)
        return found

    def _find(self, layer: int, *, launched: bool) -> list[_Group]:
        batch, size = self._batch, self._pool.page_size
        starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
        order = batch.prompts or PromptOrder(list(range(len(lengths))), [0] * len(lengths))
        groups: list[list[_Prompt]] = []
        rows: list[list[npt.NDArray[np.int64]]] = []
        for index, common in zip(order.order, order.common, strict=True):
            at = np.arange(common, lengths[index])
            slots = batch.page_table[index, at // size].astype(np.int64) * size + at % size
            if not common:
                groups.append([])
                rows.append([])
            groups[-1].append(_Prompt(slice(starts[index], starts[index + 1]), lengths[index], common))
            rows[-1].append(self._pool.rows(layer, slots[None]).ravel())
        found: list[_Group] = []
        short: list[tuple[_Prompt, npt.NDArray[np.int64]]] = []

        def close() -> None:
            if short:
                prompts, rows = [each for each, _ in short], np.concatenate([own for _, own in short])
                tokens, keys = [each.count for each in prompts], [each.keys for each in prompts]
                together = Ragged.of(tokens, keys, self._ops) if launched and len(prompts) > 1 else None
                found.append(_Group(prompts, [self._ops.to_device(rows)], together))
                short.clear()

        # As they stand in the step, so that one launch may take neighbours.
        for group, own in sorted(zip(groups, rows, strict=True), key=lambda each: each[0][0].tokens.start):
            first = group[0]
            alone = first.keys >= LEAST_PLANNED and (not launched or first.count == first.keys)
            if len(group) > 1 or alone:
                found.append(_Group(group, [self._ops.to_device(np.ascontiguousarray(each)) for each in own]))
                continue
            apart = launched and bool(short) and short[-1][0].tokens.stop != first.tokens.start
            if apart or sum(each.keys for each, _ in short) + first.keys > _GATHERED:
                close()
            short.append((first, own[0]))
        close()
        return found


def _attend(
    layer: AttentionLayer, query: Tensor, group: list[_Prompt], stored: list[Tensor], out: Tensor | None
) -> Tensor:
    """Attends with the last tokens of each request of a group over the request's vectors.

    Args:
        layer: The layer's constants.
        query: [T, H, D]: of all requests of the step.
        group: The requests.
        stored: The vectors of each request, except those that it shares with the request before it.
        out: [T, H, V]: gets the group's rows, and is returned; None: the group is one request with all of the rows.
    """
    assert layer.latent is not None
    heads, dim = query.shape[1:]
    latent, value_dim = layer.latent, layer.latent.value_dim
    most = max(each.keys for each in group)
    # Prompts are padded to a multiple of this, because lengths with the same plan must compute the same number of heads at once.
    count = max(1, _EXPANDED // (rounded(most) * (dim + value_dim)))
    for start in range(0, heads, count):
        some = slice(start, min(start + count, heads))
        made: tuple[Tensor, Tensor] | None = None
        for each, own in zip(group, stored, strict=True):
            asked = query[each.tokens, some]
            tokens, length = len(asked), each.keys
            planned = tokens == length >= LEAST_PLANNED and prefers_cudnn(asked.device)
            # Flash attention wants heads of one size.
            kind = asked.device, asked.dtype, asked.shape[1], dim, value_dim, LEAST_PLANNED
            narrow = planned and not each.common and takes_narrow(*kind)
            vectors = padded(own) if narrow else own
            key, value = latent.expand(vectors, some, wide=not narrow)
            if len(group) > 1:
                made = made or (key.new_empty(most, *key.shape[1:]), key.new_empty(most, *key.shape[1:]))
                for whole, part in zip(made, (key, value), strict=True):
                    whole[each.common : length, :, : part.shape[2]] = part[: length - each.common]
                if not narrow:
                    key, value = made[0][:length], made[1][:length]
            if planned:
                asked = padded(asked)
                key, value = (key, value) if narrow else (padded(key), padded(value))
            found = _attended(asked, key, value, layer.scale, planned=planned)[:tokens, :, :value_dim]
            if out is None and count >= heads:
                return found.contiguous()
            out = layer.empty_result(query) if out is None else out
            out[each.tokens, some] = found
    assert out is not None
    return out


def _attend_short(layer: AttentionLayer, query: Tensor, group: _Group, vectors: Tensor, out: Tensor) -> Tensor:
    """Does what :func:`_attend` does, for requests that share nothing and whose vectors lie one after the other in one tensor."""
    assert layer.latent is not None
    (heads, dim), value_dim = query.shape[1:], layer.latent.value_dim
    every = slice(group.prompts[0].tokens.start, group.prompts[-1].tokens.stop)
    count = max(1, _EXPANDED // (len(vectors) * 2 * dim))
    for start in range(0, heads, count):
        some = slice(start, min(start + count, heads))
        keys, values = layer.latent.expand(vectors, some, wide=True)
        if group.together is not None:
            found = ragged_attention(query[every, some], keys, values, group.together, layer.scale)
            out[every, some] = found[..., :value_dim]
            continue
        end = 0
        for each in group.prompts:
            own = slice(end, end + each.keys)
            end = own.stop
            found = _attended(query[each.tokens, some], keys[own], values[own], layer.scale, planned=False)
            out[each.tokens, some] = found[..., :value_dim]
    return out


def _attended(query: Tensor, key: Tensor, value: Tensor, scale: float, *, planned: bool) -> Tensor:
    """Attention of the last queries of a request over its keys: [T, H, D], [M, H, D] and [M, H, V] -> [T, H, V].

    ``planned``: by cuDNN, if torch prefers cuDNN; torch does so if there are as many queries as keys.
    """
    from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, which other workers never need

    mask = causal_lower_right(len(query), len(key))
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    with nullcontext() if planned or len(query) < len(key) else without_cudnn():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)
