"""A head's next draft, begun behind a check before the host knows how much of the draft before was right.

Where a draft begins depends on how many tokens the check accepts. The device finds that out by itself: it takes the positions,
slots and keys of the draft from those that were prepared for every number of tokens. So it drafts while the host takes the
check's result, plans, and launches the next check. What is drafted ahead for a request that has ended is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.runner.graphs.decode_rows import DecodeRows
from sapwood_worker.model.runner.graphs.late_tokens import DraftedTokens
from sapwood_worker.records.step import IntArray, Step


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """Where P requests, for which a draft is to be checked, may be drafted on.

    Attributes:
        rows: int64 [P]: rows of the page table.
        pages: int32 [P, W]: their pages.
        reach: int64 [P]: tokens that these pages hold.
        steps: The decodes of their draft, and of the next.
    """

    rows: IntArray
    pages: npt.NDArray[np.int32]
    reach: IntArray
    steps: int

    def begin(self, check: Step) -> tuple[DecodeRows, IntArray]:
        """A head's first decodes after a check if it accepts nothing, and at how many positions from there on each request has
        room for one, whatever is accepted."""
        positions = check.starts + 1
        tokens = np.full(len(positions), -1)
        rows = DecodeRows(tokens, positions, self.rows, self.pages, None, None, left=positions)
        # What a decode makes is left a slot further.
        return rows, np.clip(self.reach - 1 - positions, 0, check.counts - 1 + self.steps)


@dataclass(frozen=True, slots=True)
class DraftAhead:
    """A draft that was begun behind a check.

    Attributes:
        room: Where.
        starts, counts: int64 [P]: the check's.
        tokens: The draft, each request's first token and those of ``room.steps`` decodes.
    """

    room: DraftRoom
    starts: IntArray
    counts: IntArray
    tokens: DraftedTokens

    def decodes(self, first: Step, wanted: IntArray) -> int | None:
        """How many decodes of a chain (:meth:`DraftingRunner.launch_chain`) it holds; None: it is another one, or ended early."""
        room, ends = self.room, first.starts + first.counts
        if first.entries or not np.array_equal(first.rows, room.rows):
            return None
        # What was computed are the tokens after ``starts``, as many as ``counts`` at most.
        if (first.starts <= self.starts).any() or (ends > self.starts + 1 + self.counts).any():
            return None
        there = np.minimum(room.steps, room.reach - ends)
        if (wanted <= there).all():
            return int(wanted.max())
        return room.steps if (there == room.steps).all() else None


def accepted(check: Step, computed: Tensor, sampled: Tensor, ops: DeviceOps) -> Tensor:
    """int64 [P]: how many tokens of each request's draft a check has found right; no host waits for it.

    Args:
        check: P requests' drafts, each with the token before it.
        computed: int64 [T]: the tokens that it computes.
        sampled: int64 [T]: what it has sampled after each.
        ops: The operations of their device.
    """
    counts = check.counts
    firsts, places = np.cumsum(counts) - counts, np.arange(max(1, int(counts.max()) - 1))
    at = firsts[:, None] + np.minimum(places, np.maximum(counts - 2, 0)[:, None])
    after = np.minimum(at + 1, len(check.token_ids) - 1)
    at, after, drafted = ops.to_device(np.stack((at, after, (places < counts[:, None] - 1).astype(np.int64))))
    return (sampled[at] == computed[after]).long().mul(drafted).cumprod(1).sum(1)
