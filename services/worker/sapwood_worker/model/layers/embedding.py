"""Token embedding and output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.quantization.dense import DenseMethod
from sapwood_worker.model.quantization.linear_method import LinearShape, Part
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots, whole


class Embedding(Layer):
    """Rows of a table, scaled.

    Args:
        vocab_size: Rows.
        hidden_size: Width of a row.
        scale: Factor on the output, rounded to the table's dtype first (as Gemma does).
        context: Where and how it is built.
    """

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, context: LayerContext) -> None:
        super().__init__()
        self._prefix = context.prefix
        empty = torch.empty(vocab_size, hidden_size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._scale = torch.tensor(scale, dtype=context.dtype).item()

    def slots(self) -> WeightSlots:
        return {f"{self._prefix}.weight": WeightSlot(self.weight)}

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows * self._scale


class LMHead(Layer):
    """Logits from hidden states.

    Args:
        vocab_size: Logits of a row.
        hidden_size: Width of the hidden states.
        tied: The embedding's table, if it is the head's, too; checkpoints then have no tensor for the head.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        context: Where and how it is built.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied: Tensor | None, softcap: float | None, context: LayerContext
    ) -> None:
        super().__init__()
        shape = LinearShape((Part(context.prefix, whole(vocab_size)),), whole(hidden_size))
        self._method = DenseMethod(shape, context.dtype, context.ops, weight=tied, one_row_dtype=torch.float32)
        self._tied = tied is not None
        self._softcap = softcap

    def slots(self) -> WeightSlots:
        return {} if self._tied else self._method.slots()

    def finish(self) -> None:
        self._method.finish()

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """[R, hidden_size], which it norms first -> [R, vocab_size], float32 or the model's dtype."""
        if self._method.fuses(hidden.shape[0]).norm:
            logits = self._method.apply(hidden, norm=norm)
        else:
            logits = self._method.apply(norm(hidden))
        if self._softcap is not None:
            logits = logits.float().div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
