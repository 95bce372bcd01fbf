"""Where the graphs of a stage of a pipeline read what other stages send: always in the same place."""

from __future__ import annotations

from torch import Tensor

from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.heads.head import Head


class StageBuffers:
    """Tensors that graphs read, and what fills them outside of the graphs.

    Args:
        model: The stage's part of the model.
        rows: Tokens of the largest graph.

    Attributes:
        first: Whether the stage gets tokens, and nothing of another stage.
        received: [rows, hidden_size]: what the stage before has sent; layers may overwrite it.
        last: [rows, hidden_size]: what the last stage's layers give.
    """

    def __init__(self, model: DecoderModel, rows: int) -> None:
        self._link = model.link
        self.first = model.link.first
        self.received, self.last = (model.link.empty(rows).zero_() for _ in range(2))

    @classmethod
    def of(cls, model: DecoderModel | Head, rows: int) -> StageBuffers | None:
        """The buffers for a model; None: it is in no stages."""
        return None if isinstance(model, Head) or model.link.alone else cls(model, rows)

    def receive(self, tokens: int, rows: int) -> None:
        """Before the layers: fills ``received`` with what the stage before sends, if there is one.

        Args:
            tokens: How many.
            rows: Of the graph. Rows that pad it are zero: else layers would add to what they left there the time before.
        """
        if not self.first:
            self.received[:tokens].copy_(self._link.receive(tokens))
            if tokens < rows:
                self.received[tokens:rows].zero_()

    def send(self, hidden: Tensor) -> None:
        """After the layers: sends what they have given on to the next stage, if there is one."""
        if not self._link.last:
            self._link.send(hidden)

    def spread(self, hidden: Tensor) -> None:
        """Fills ``last``; called by all stages.

        Args:
            hidden: [T, hidden_size]: what this stage's layers have given; only the last stage's is read.
        """
        last = self.last[: len(hidden)]
        self._link.spread(last.copy_(hidden) if self._link.last else last)
