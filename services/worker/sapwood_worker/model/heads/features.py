"""How a head's steps are shifted: it has the token at p + 1 where the model has that at p.

The scheduler plans a head's steps as a draft model's, by the tokens' own positions. A head computes them a position earlier, in
the slots where the model has left the features; and what it makes of the last of them is left in the slot after, which the model
has not computed yet, for the step that drafts on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.records.step import Step


class ShiftedSteps:
    """Shifts a head's steps.

    Args:
        store: [slots, hidden_size]: the features.
        page_size: Tokens in a page.
        ops: The operations of the store's device.
    """

    def __init__(self, store: Tensor, page_size: int, ops: DeviceOps) -> None:
        self._store = store
        self._page_size = page_size
        self._ops = ops

    def shift(self, step: Step) -> Step:
        """The step as the head computes it. None of its parts may begin at position 0."""
        return replace(step, starts=step.starts - 1)

    def leave(self, step: Step, hidden: Tensor) -> None:
        """Leaves what the head made, [T, hidden_size], of the last token of each part of a step that drafts."""
        if not step.samples.all():
            return
        last, size = step.starts + step.counts - 1, self._page_size
        slots = step.pages[np.arange(len(last)), last // size].astype(np.int64) * size + last % size
        ends = self._ops.to_device(np.cumsum(step.counts) - 1)
        self._store.index_copy_(0, self._ops.to_device(slots), hidden.index_select(0, ends))
