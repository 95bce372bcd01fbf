"""Token embedding and output head."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.norm import AnyNorm, RMSNorm
from sapwood_worker.model.quantization.linear_method import LinearMethod, LinearShape, Part, Renewal
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots, whole


class VocabTable:
    """A rank's rows of a table with a row for each token of the vocabulary.

    Args:
        vocab_size: Rows of the whole table.
        hidden_size: Width of a row.
        context: Where and how it is built.

    Attributes:
        part: Which rows the rank has.
        method: Looks rows up and multiplies with them. Every rank has the same number of rows; missing rows are zeros.
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        self.part = context.parallel.shard_rows(vocab_size)
        self.method = context.linear.table(*_shape(vocab_size, hidden_size, context))


def _shape(vocab_size: int, hidden_size: int, context: LayerContext) -> tuple[LinearShape, int]:
    """A rank's part of a weight with a row for each token, and how many rows any rank has at most."""
    part = Part(context.prefix, context.parallel.shard_rows(vocab_size))
    return LinearShape((part,), whole(hidden_size)), -(-vocab_size // context.parallel.tp.size)


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
        self._group = context.split_over
        self.table = VocabTable(vocab_size, hidden_size, context)
        self._scale = torch.tensor(scale, dtype=context.dtype).item()

    def slots(self) -> WeightSlots:
        return self.table.method.slots()

    @property
    def renewal(self) -> Renewal:
        return "copy" if self.table.method.renewal == "copy" else "refuse"

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        if self._group is None:
            rows = self.table.method.rows(token_ids)
        else:
            local = token_ids - self.table.part.start
            elsewhere = (local < 0) | (local >= self.table.part.size)
            rows = self.table.method.rows(local.masked_fill_(elsewhere, 0))
            rows = self._group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))
        return rows if self._scale == 1.0 else rows * self._scale


@dataclass(frozen=True, slots=True)
class PositionConfig:
    """A table of positions, a row each, that is added to the embeddings of tokens.

    Attributes:
        rows: How many positions there are.
        offset: Rows before that of the first position (OPT).
    """

    rows: int
    offset: int = 0


class PositionEmbedding(Layer):
    """The rows of positions; every rank has all.

    Args:
        config: The table.
        hidden_size: Width of a row.
        context: Where and how it is built.
    """

    def __init__(self, config: PositionConfig, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        rows = config.rows + config.offset
        self._table = torch.empty(rows, hidden_size, dtype=context.dtype, device=context.device)
        self._offset, self._name = config.offset, f"{context.prefix}.weight"

    def slots(self) -> WeightSlots:
        return {self._name: WeightSlot(self._table)}

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]. Padding may have any position: those beyond the table get its last row."""
        return self._table[(positions + self._offset).clamp_(max=len(self._table) - 1)]


class VocabParallelHead(Layer):
    """Logits from hidden states; the vocabulary is split over the ranks, and every rank gets all logits.

    Args:
        vocab_size: Logits of a row.
        hidden_size: Width of the hidden states.
        tied: The embedding's table, if it is the head's, too; checkpoints then have no tensor for the head.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        scale: Factor on logits before that.
        context: Where and how it is built: an untied head comes after all layers that may be quantised.
        labels: Whether the rows stand for a few labels, not for tokens: then the head is not quantised.
        bias: Whether a bias is added to logits.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabTable | None,
        softcap: float | None,
        context: LayerContext,
        scale: float = 1.0,
        labels: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self._scale = scale
        self._group = context.split_over
        self._vocab_size = vocab_size
        make = context.linear.table if labels else context.linear.head
        self._make: Callable[[], LinearMethod] = partial(make, *_shape(vocab_size, hidden_size, context))
        self._method: LinearMethod = self._make() if tied is None else tied.method
        self._name = f"{context.prefix}.weight"
        self._tied = tied is not None
        self._softcap = softcap
        self._bias = torch.empty(vocab_size, dtype=torch.float32, device=context.device) if bias else None
        self._bias_name = f"{context.prefix}.bias"

    def slots(self) -> WeightSlots:
        own = {} if self._bias is None else {self._bias_name: WeightSlot(self._bias)}
        return own if self._tied else {**self._method.slots(), **own}

    def finish(self) -> None:
        self._method.finish()

    def forget_copies(self) -> None:
        self._method.forget_copies()

    @property
    def renewal(self) -> Renewal:
        return "copy" if self._tied else self._method.renewal

    @property
    def weight_name(self) -> str:
        return self._name

    def depends_on(self) -> Collection[str]:
        return self._method.slots().keys()

    def rebuilt(self) -> LinearMethod:
        return self._make()

    def put_method(self, method: LinearMethod) -> LinearMethod:
        before, self._method = self._method, method
        return before

    def forward(self, hidden: Tensor, norm: AnyNorm) -> Tensor:
        """[R, hidden_size], which it norms first -> [R, vocab_size], float32 or the model's dtype."""
        if isinstance(norm, RMSNorm) and self._method.fuses(hidden.shape[0]).norm:
            logits = self._method.apply(hidden, norm=norm)
        else:
            logits = self._method.apply(norm(hidden))
        if self._group is not None:
            logits = self._group.all_gather(logits)[:, : self._vocab_size].contiguous()
        if self._bias is not None:
            logits = logits.float().add_(self._bias)
        if self._scale != 1.0:
            logits = logits.float().mul_(self._scale)
        if self._softcap is not None:
            logits = logits.float().div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
