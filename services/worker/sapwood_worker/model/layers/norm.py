"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_worker.model.distributed.overlap import Overlap
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots


class RMSNorm(Layer):
    """Root-mean-square norm: ``sapwood_kernels.reference.rms_norm``.

    The weight is float32 whatever the model's dtype, and is the factor itself: for Gemma, 1 + w.

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
        """Takes what whoever computed x has computed of it in the same pass, until it is asked for."""
        self._kept = x, normed

    def has(self, x: Tensor) -> bool:
        """Whether x is what :meth:`keep` was last told of."""
        return self._kept is not None and self._kept[0] is x

    def computes(self, x: Tensor) -> bool:
        """Whether x is there as a whole and what is normed of it is not: then who needs both may norm it in a pass of its own."""
        return self._overlap is None and not self.has(x)

    def expect(self, overlap: Overlap) -> None:
        """Tells what adds to the residual that it sees next."""
        self._overlap = overlap

    def pieces(self, x: Tensor) -> Iterator[Tensor] | None:
        """The normed rows of x, [T, N] in all, as what is still to be added to them comes; None: all is there. Whoever asks takes
        all of them."""
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
        context: Where and how it is built.
    """

    def __init__(self, width: int, eps: float, context: LayerContext, *, bias: bool) -> None:
        super().__init__()
        stored = torch.zeros(2, width, dtype=torch.float32, device=context.device)
        self._stored = nn.Parameter(stored, requires_grad=False)
        self._eps, self._has_bias, self._prefix = eps, bias, context.prefix

    def slots(self) -> WeightSlots:
        slots = {f"{self._prefix}.weight": WeightSlot(self._stored[0], norm=True)}
        if self._has_bias:
            slots[f"{self._prefix}.bias"] = WeightSlot(self._stored[1])
        return slots

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        weight, bias = self._stored
        return F.layer_norm(x.float(), weight.shape, weight, bias, self._eps).to(x.dtype)


AnyNorm = RMSNorm | LayerNorm
