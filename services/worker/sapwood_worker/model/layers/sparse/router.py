"""The router of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.norm import AnyNorm, RMSNorm
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots


class Router(Layer):
    """Chooses each token's experts. It computes in float32: experts whose scores are near each other are not to change places.

    Args:
        hidden_size: Width of the input.
        routing: How experts are chosen.
        bias: Whether its logits have a bias.
        correction: What checkpoints call what scores are corrected by where experts are chosen; empty: they are not.
        correction_dims: Its dimensions there: 1, or 2 where it is a matrix of one row.
        context: Where and how it is built.

    Attributes:
        counts: int64 [E], on the device: how many tokens have gone to each expert.
    """

    def __init__(
        self,
        hidden_size: int,
        routing: Routing,
        *,
        bias: bool,
        correction: str,
        correction_dims: int,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._prefix, self._corrected, self._dims = context.prefix, correction, correction_dims

        def empty(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=context.device)

        self.counts = torch.zeros(routing.experts, dtype=torch.int64, device=context.device)
        self._weight = empty(routing.experts, hidden_size)
        self._bias = empty(routing.experts) if bias else None
        self._correction = empty(routing.experts) if correction else None
        # Of rows that are sent to experts of other ranks, what experts get from all ranks is counted there.
        counted = self.counts if context.parallel.expert_exchange is None else torch.zeros_like(self.counts)
        joined = context.parallel.rows is not None and context.parallel.expert_exchange is None
        ranks = context.parallel.tp.size if joined else 1
        self._context = context
        self._logits: Callable[[Tensor], Tensor]
        self._normed = context.ops.normed_logits(self._weight, self._bias)
        self._route = context.ops.router(routing, self._correction, counted, ranks)

    def slots(self) -> WeightSlots:
        named = {
            f"{self._prefix}.weight": self._weight,
            f"{self._prefix}.bias": self._bias,
        }
        if self._correction is not None:
            named[self._corrected] = self._correction if self._dims == 1 else self._correction[None]
        return {name: WeightSlot(each) for name, each in named.items() if each is not None}

    def finish(self) -> None:
        self._logits = self._context.ops.router_logits(self._weight, self._bias, self._context.dtype)

    def forward(self, hidden: Tensor, norm: AnyNorm | None, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size], a step's rows from ``first`` on -> the same, normed by ``norm`` if it is given; each token's experts,
        integers [T, k], and their weights, float32 [T, k]."""
        fused = self._normed
        if fused is not None and len(hidden) <= fused.most and isinstance(norm, RMSNorm) and norm.computes(hidden):
            x, logits = fused.product(hidden, norm.weight, norm.eps)
        else:
            x = hidden if norm is None else norm(hidden)
            logits = self._logits(x)
        return x, *self._route(logits, first=first)
