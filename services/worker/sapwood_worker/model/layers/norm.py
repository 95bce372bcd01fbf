"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_worker.model.distributed.overlap import Overlap
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole


class RMSNorm(Layer):
    """Root-mean-square norm: ``sapwood_kernels.reference.rms_norm``.

    The weight is float32 for every model dtype, and is the factor itself: for Gemma, 1 + w.

    Args:
        width: Numbers that are normed together.
        eps: Added to the mean square.
        context: Where and how it is built.
    """

    def __init__(self, width: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        empty = torch.empty(width, dtype=torch.float32, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps
        self._context = context
        self._norm: Callable[[Tensor], Tensor]
        self._kept: tuple[Tensor, Tensor] | None = None
        self._overlap: Overlap | None = None

    def slots(self) -> WeightSlots:
        return {f"{self._context.prefix}.weight": WeightSlot(self.weight, norm=True)}

    def finish(self) -> None:
        self._norm = self._context.ops.rms_norm(self.weight, self.eps, self._context.dtype)

    def keep(self, x: Tensor, normed: Tensor) -> None:
        """Keeps the normed x that the kernel which computed x has also computed, until it is asked for."""
        self._kept = x, normed

    def has(self, x: Tensor) -> bool:
        """Whether x is the tensor of the last :meth:`keep`."""
        return self._kept is not None and self._kept[0] is x

    def computes(self, x: Tensor) -> bool:
        """Whether x is complete and its norm is not computed yet: then a caller that needs both may compute the norm
        separately."""
        return self._overlap is None and not self.has(x)

    def expect(self, overlap: Overlap) -> None:
        """Sets the object that adds to the residual that this norm reads next."""
        self._overlap = overlap

    def pieces(self, x: Tensor) -> Iterator[Tensor] | None:
        """Yields the normed rows of x, [T, N] in all, as the sums that must still be added arrive; None: x is complete. The
        caller takes all of them."""
        overlap, self._overlap = self._overlap, None
        coming = None if overlap is None else overlap.coming(x)
        return None if coming is None else (self._after(part, rows) for part, rows in coming)

    def _after(self, part: Tensor, rows: Tensor) -> Tensor:
        normed = self._context.ops.add_normed(part, rows, self)
        return self._norm(rows) if normed is None else normed

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        if (pieces := self.pieces(x)) is not None:
            return torch.cat(list(pieces))
        kept, self._kept = self._kept, None
        return self._norm(x) if kept is None or kept[0] is not x else kept[1]


class LayerNorm(Layer):
    """Norm with the mean taken away, in float32. Source: Ba et al., "Layer Normalization", 2016.

    The weight is the factor itself: for Nemotron, 1 + w.

    Args:
        width: Numbers that are normed together.
        eps: Added to the variance.
        bias: Whether a bias is added.
        weight: Whether it has weights; else they are 1.
        context: Where and how it is built.
    """

    def __init__(self, width: int, eps: float, context: LayerContext, *, bias: bool, weight: bool = True) -> None:
        super().__init__()
        stored = torch.zeros(2, width, dtype=torch.float32, device=context.device)
        stored[0] = 1.0
        self._stored = nn.Parameter(stored, requires_grad=False)
        self._eps, self._has_bias, self._has_weight, self._prefix = eps, bias, weight, context.prefix

    def slots(self) -> WeightSlots:
        slots = {f"{self._prefix}.weight": WeightSlot(self._stored[0], norm=True)} if self._has_weight else {}
        if self._has_bias:
            slots[f"{self._prefix}.bias"] = WeightSlot(self._stored[1])
        return slots

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        weight, bias = self._stored
        return F.layer_norm(x.float(), weight.shape, weight, bias, self._eps).to(x.dtype)


AnyNorm = RMSNorm | LayerNorm


# Norms of queries and keys, between their projection and rotation.


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
        """The weights of a query head's norm and of a key head's, float32 [head_dim] each, and their epsilon."""
        return self._stored[0], self._stored[1], self._eps

    def slots(self) -> WeightSlots:
        return {
            f"{self._prefix}.q_norm.weight": WeightSlot(self._stored[0], norm=True),
            f"{self._prefix}.k_norm.weight": WeightSlot(self._stored[1], norm=True),
        }


class UnitNorm(QKNorm):
    """The same without weights, in layers that rotate heads. Llama 4 norms after the rotation, which gives the same result."""

    def __init__(self, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__(head_dim, eps, context)
        self._stored.fill_(1.0)

    def slots(self) -> WeightSlots:
        return {}


class RotatedNorm(UnitNorm):
    """Norms of heads after their rotation, with weights (Hunyuan).

    The mean square of a head is the same before the rotation, so heads are normed without weights before it. In a product of
    query and key both weights are factors of each pair of numbers: the query gets both, and keys are cached without theirs.
    """

    def __init__(self, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__(head_dim, eps, context)
        self._weights = nn.Parameter(torch.empty(2, head_dim, device=context.device), requires_grad=False)

    @property
    def factor(self) -> Tensor:
        """float32 [head_dim]: of each query after its rotation. Not kept: weights may change while the model serves."""
        return self._weights[0] * self._weights[1]

    def slots(self) -> WeightSlots:
        return {
            f"{self._prefix}.query_layernorm.weight": WeightSlot(self._weights[0], norm=True),
            f"{self._prefix}.key_layernorm.weight": WeightSlot(self._weights[1], norm=True),
        }


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
        # A key head that several ranks have is counted several times.
        key_copies = max(1, context.parallel.tp.size // num_kv_heads)
        self._prefix, self._eps, self._group = context.prefix, eps, context.split_over
        size = queries.size + keys.size
        self._weight = nn.Parameter(torch.empty(size, device=context.device), requires_grad=False)
        # The factors that turn the ranks' summed squares into means.
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
        """[T, outputs of the projection]; its queries and keys are normed in place."""
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
        """[T, outputs of the projection]; its query and key heads are normed in place."""
        count, dim = self._weight.shape
        heads = qkv.view(len(qkv), -1, dim)[:, :count]
        heads.copy_(F.layer_norm(heads.float(), (dim,), eps=self._eps) * self._weight)
        return qkv


AnyQKNorm = QKNorm | WidthNorm | HeadLayerNorm


def _shards(num_heads: int, num_kv_heads: int, width: int, context: LayerContext) -> tuple[Span, Span]:
    """This rank's query and key heads, of ``width`` numbers each."""
    parallel = context.parallel
    queries = parallel.shard("num_attention_heads", num_heads, width)
    return queries, parallel.shard("num_key_value_heads", num_kv_heads, width, copies=True)
