"""Grammar masks of a step's rows: they are filled while the model computes and then applied to its logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.grammar.token_masks import TokenMasks
from sapwood_worker.records.step import ScheduledRequest


class StepMasks:
    """The masks of one step, perhaps still being filled.

    Use as a context manager around the step: on leaving it, by an error too, no grammar is touched any more.

    Args:
        rows: Rows of the logits that have a grammar, in the order of the masks.
        filled: Will hold the masks, int32 [G, W]; None: there are none.
        count: Rows of the logits.
        ops: The operations of the logits' device.
    """

    def __init__(
        self, rows: list[int], filled: Future[npt.NDArray[np.int32]] | None, count: int, ops: DeviceOps
    ) -> None:
        self._rows = rows
        self._filled = filled
        self._count = count
        self._ops = ops

    def __enter__(self) -> StepMasks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._filled is not None:
            wait([self._filled])

    def __bool__(self) -> bool:
        """Whether any row has a grammar."""
        return self._filled is not None

    def apply(self, logits: Tensor) -> None:
        """Forbids, in place, what the grammars forbid. Waits for the masks.

        Args:
            logits: float [R, V].
        """
        if self._filled is None:
            return
        bitmask = self._ops.to_device(self._filled.result())
        every = len(self._rows) == self._count
        rows = None if every else self._ops.to_device(np.array(self._rows))
        self._ops.forbid_tokens(logits, bitmask, rows)


class GrammarMasks:
    """Begins to fill the masks of each step.

    Args:
        vocab_size: Columns of the logits.
        ops: The operations of the logits' device.
    """

    def __init__(self, vocab_size: int, ops: DeviceOps) -> None:
        self._words = -(-vocab_size // 32)
        self._masks = TokenMasks()
        self._ops = ops

    def start(self, requests: Sequence[ScheduledRequest]) -> StepMasks:
        """The masks of the rows that these requests sample, one row each, in order."""
        rows = [row for row, request in enumerate(requests) if request.grammar is not None]
        states = [request.grammar for request in requests if request.grammar is not None]
        filled = self._masks.start(states, self._words) if states else None
        return StepMasks(rows, filled, len(requests), self._ops)
