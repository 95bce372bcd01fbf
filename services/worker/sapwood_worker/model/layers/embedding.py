"""Token embedding and output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.quantization.dense import DenseMethod
from sapwood_worker.model.quantization.linear_method import LinearShape, Part
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots, whole


class VocabTable:
    """A rank's rows of a table with a row for each token of the vocabulary, and zeros where ranks before it have more rows.

    Args:
        vocab_size: Rows of the whole table.
        hidden_size: Width of a row.
        context: Where and how it is built.

    Attributes:
        rows: Which rows the rank has.
        weight: [rows of every rank, hidden_size].
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        self.rows = context.parallel.shard_rows(vocab_size)
        each = -(-vocab_size // context.parallel.tp.size)
        self.weight = torch.empty(each, hidden_size, dtype=context.dtype, device=context.device)
        self.weight[self.rows.size :] = 0


class VocabParallelEmbedding(Layer):
    """Rows of a table, scaled; the table is split over the ranks.

    Args:
        vocab_size: Rows.
        hidden_size: Width of a row.
        scale: Factor on the output, rounded to the table's dtype first (as Gemma does).
        context: Where and how it is built.

    Attributes:
        table: The rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, context: LayerContext) -> None:
        super().__init__()
        self._name = f"{context.prefix}.weight"
        self._group = context.split_over
        self.table = VocabTable(vocab_size, hidden_size, context)
        self._scale = torch.tensor(scale, dtype=context.dtype).item()

    @property
    def weight(self) -> Tensor:
        """The table."""
        return self.table.weight

    def slots(self) -> WeightSlots:
        rows, weight = self.table.rows, self.table.weight
        return {self._name: WeightSlot(weight[: rows.size], spans=(rows, whole(weight.shape[1])))}

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        if self._group is None:
            rows = F.embedding(token_ids, self.table.weight)
        else:
            local = token_ids - self.table.rows.start
            elsewhere = (local < 0) | (local >= self.table.rows.size)
            rows = F.embedding(local.masked_fill_(elsewhere, 0), self.table.weight)
            rows = self._group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))
        return rows if self._scale == 1.0 else rows * self._scale


class VocabParallelHead(Layer):
    """Logits from hidden states; the vocabulary is split over the ranks, and every rank gets all logits.

    Args:
        vocab_size: Logits of a row.
        hidden_size: Width of the hidden states.
        tied: The embedding's table, if it is the head's, too; checkpoints then have no tensor for the head.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        context: Where and how it is built.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabTable | None,
        softcap: float | None,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._group = context.split_over
        self._vocab_size = vocab_size
        table = VocabTable(vocab_size, hidden_size, context) if tied is None else tied
        shape = LinearShape((Part(context.prefix, table.rows),), whole(hidden_size))
        self._method = DenseMethod(shape, context.dtype, context.ops, weight=table.weight, one_row_dtype=torch.float32)
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
        if self._group is not None:
            logits = self._group.all_gather(logits)[:, : self._vocab_size].contiguous()
        if self._softcap is not None:
            logits = logits.float().div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
