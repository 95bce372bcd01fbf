"""Norms of queries and keys, between their projection and rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole


class QKNorm(Layer):
    """The weights of a norm on each query head and of one on each key head.

    Args:
        head_dim: Elements a head.
        eps: Added to the mean square.
        context: Where and how it is built.
    """

    def __init__(self, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self._prefix = context.prefix
        self._stored = nn.Parameter(torch.empty(2, head_dim, device=context.device), requires_grad=False)
        self._eps = eps

    @property
    def norm(self) -> tuple[Tensor, Tensor, float]:
        """The weights of a query head's norm and of a key head's, float32 [head_dim] each, and what is added to mean squares."""
        return self._stored[0], self._stored[1], self._eps

    def slots(self) -> WeightSlots:
        return {
            f"{self._prefix}.q_norm.weight": WeightSlot(self._stored[0], norm=True),
            f"{self._prefix}.k_norm.weight": WeightSlot(self._stored[1], norm=True),
        }


class UnitNorm(QKNorm):
    """The same without weights, in the layers that turn heads (Llama 4, which norms them after that: it changes nothing)."""

    def __init__(self, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__(head_dim, eps, context)
        self._stored.fill_(1.0)

    def slots(self) -> WeightSlots:
        return {}


class WidthNorm(Layer):
    """An RMSNorm over all query heads together and one over all key heads (OLMo 2); ranks add up their squares.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Elements a head.
        eps: Added to the mean square.
        context: Where and how it is built.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        queries, keys = self._queries, self._keys = _shards(num_heads, num_kv_heads, head_dim, context)
        # Ranks of which several have the same key head count it several times.
        key_copies = max(1, context.parallel.tp.size // num_kv_heads)
        self._prefix, self._eps, self._group = context.prefix, eps, context.split_over
        size = queries.size + keys.size
        self._weight = nn.Parameter(torch.empty(size, device=context.device), requires_grad=False)
        # What makes means of the sums of squares that ranks add up.
        shares = torch.tensor([1.0 / queries.total, 1.0 / (keys.total * key_copies)], device=context.device)
        self.register_buffer("_shares", shares, persistent=False)
        self._shares: Tensor

    def slots(self) -> WeightSlots:
        at = self._queries.size
        return {
            f"{self._prefix}.q_norm.weight": WeightSlot(self._weight[:at], norm=True, spans=(self._queries,)),
            f"{self._prefix}.k_norm.weight": WeightSlot(self._weight[at:], norm=True, spans=(self._keys,)),
        }

    def forward(self, qkv: Tensor) -> Tensor:
        """[T, outputs of the projection], of which it norms queries and keys in place."""
        both = qkv[:, : len(self._weight)]
        parts = torch.split(both.float(), [self._queries.size, self._keys.size], dim=1)
        means = torch.stack([part.square().sum(1) for part in parts], 1) * self._shares
        if self._group is not None:
            means = self._group.all_reduce(means)
        scales = torch.rsqrt(means + self._eps)
        normed = torch.cat([part * scales[:, nth, None] for nth, part in enumerate(parts)], 1)
        both.copy_(normed * self._weight)
        return qkv


class HeadLayerNorm(Layer):
    """A LayerNorm without bias on each query and key head, each with weights of its own (Cohere).

    Args:
        num_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Elements a head.
        eps: Added to the variance.
        context: Where and how it is built.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        queries, keys = self._queries, self._keys = _shards(num_heads, num_kv_heads, 1, context)
        self._prefix, self._eps = context.prefix, eps
        stored = torch.empty(queries.size + keys.size, head_dim, device=context.device)
        self._weight = nn.Parameter(stored, requires_grad=False)

    def slots(self) -> WeightSlots:
        at, dim = self._queries.size, whole(self._weight.shape[1])
        return {
            f"{self._prefix}.q_norm.weight": WeightSlot(self._weight[:at], norm=True, spans=(self._queries, dim)),
            f"{self._prefix}.k_norm.weight": WeightSlot(self._weight[at:], norm=True, spans=(self._keys, dim)),
        }

    def forward(self, qkv: Tensor) -> Tensor:
        """[T, outputs of the projection], of which it norms query and key heads in place."""
        count, dim = self._weight.shape
        heads = qkv.view(len(qkv), -1, dim)[:, :count]
        heads.copy_(F.layer_norm(heads.float(), (dim,), eps=self._eps) * self._weight)
        return qkv


AnyQKNorm = QKNorm | WidthNorm | HeadLayerNorm


def _shards(num_heads: int, num_kv_heads: int, width: int, context: LayerContext) -> tuple[Span, Span]:
    """This rank's query and key heads, of so many numbers each."""
    parallel = context.parallel
    queries = parallel.shard("num_attention_heads", num_heads, width)
    return queries, parallel.shard("num_key_value_heads", num_kv_heads, width, copies=True)
