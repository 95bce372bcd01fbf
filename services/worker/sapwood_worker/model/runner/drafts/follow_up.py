"""What a head has computed behind a check, before the host knew how much of the draft was right.

A check of a draft leaves the model's features of all its positions, and the tokens sampled there. So the head can compute all
these positions at once, while the host waits for the check's result and plans. The next draft then begins with what the head
made of the last position that counts. What it has written for later positions is written again before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sapwood_worker.model.runner.graphs.cuda_graph import DecodeResult
from sapwood_worker.records.step import IntArray, Step


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The computed positions of P requests.

    Attributes:
        rows: int64 [P]: rows of the page table.
        starts: int64 [P]: the positions of their tokens, as the scheduler counts a head's: ``starts + 1`` and up.
        counts: int64 [P]: how many.
        result: What came of all of them, in order; good until the head's next step.
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    result: DecodeResult

    def ends(self, step: Step) -> IntArray | None:
        """int64: where in ``result`` each part of a head's step ends, not yet shifted; None: not all of it was computed, or the
        head has to be told of a request. Vectorised."""
        order = np.argsort(self.rows)
        at = order[np.minimum(np.searchsorted(self.rows, step.rows, sorter=order), len(order) - 1)]
        last = step.starts + step.counts - 1
        first, found = self.starts[at], self.rows[at] == step.rows
        found &= (first < step.starts) & (last <= first + self.counts[at]) & (step.samples > 0)
        if step.entries or not found.all():
            return None
        ends: IntArray = (np.cumsum(self.counts) - self.counts)[at] + last - first - 1
        return ends
