"""Frequency, presence and repetition penalties, and the counts of tokens that they need.

The counts are dense, one row of the vocabulary for each row of the page table, and stay on the device: a row is filled when a
request with penalties first samples in it, and then counts each token right where it was sampled. No memory is taken before
the first such request.

Source of the formulas: OpenAI's API reference (frequency, presence: over the output), Keskar et al., "CTRL", 2019, as in
transformers (repetition: over prompt and output).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.sampling.positions import Drafts
from sapwood_worker.records.step import IntArray


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of S of the R rows of a step.

    Attributes:
        at: int64 [S], on the host: the rows of the logits.
        rows: int64 [S]: the same on the device.
        slots: int64 [S]: the rows of the page table, under which tokens are counted.
        frequency: float32 [S, 1].
        presence: float32 [S, 1].
        repetition: float32 [S, 1], over 0.
    """

    at: IntArray
    rows: Tensor
    slots: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor

    def select(self, some: IntArray, ops: DeviceOps, slots: Tensor | None = None) -> Penalties:
        """The penalties of some of the S requests.

        Args:
            some: Which, int64 [N] in 0 .. S - 1.
            ops: The device's operations.
            slots: Rows of counts for all S, instead of ``self.slots``.
        """
        which = ops.to_device(some)
        parts = (self.rows, self.slots if slots is None else slots, self.frequency, self.presence, self.repetition)
        return Penalties(self.at[some], *(each.index_select(0, which) for each in parts))


class TokenCounts:
    """How often each token is in the output of each row's request, and whether it is in its prompt or output at all.

    Args:
        rows: Rows of the page table.
        vocab_size: Number of tokens.
        ops: The operations of the logits' device, where the counts are.
    """

    def __init__(self, rows: int, vocab_size: int, ops: DeviceOps) -> None:
        self._shape = rows, vocab_size
        self._ops = ops
        self._tables: tuple[Tensor, Tensor] | None = None

    def enter(self, row: int, tokens: array[int], output_start: int) -> None:
        """Counts a row anew.

        Args:
            row: The row of the page table.
            tokens: Prompt and output so far; copied.
            output_start: Where the output begins.
        """
        if self._tables is None:
            counts = torch.zeros(self._shape, dtype=torch.int32, device=self._ops.device)
            self._tables = counts, torch.zeros(self._shape, dtype=torch.bool, device=self._ops.device)
        counts, seen = self._tables[0][row], self._tables[1][row]
        ids = self._ops.to_device(np.frombuffer(tokens, np.uint32).astype(np.int64))
        counts.zero_()
        counts.index_add_(0, ids[output_start:], torch.ones_like(ids[output_start:], dtype=torch.int32))
        seen.zero_()
        seen.index_fill_(0, ids, True)

    def apply(self, logits: Tensor, penalties: Penalties, drafts: Drafts | None = None) -> None:
        """Changes the logits [R, V] of the rows that have penalties, in place. At the positions of a draft the drafted tokens
        before count as sampled."""
        if drafts is not None:
            self._apply_drafted(logits, penalties, drafts)
            return
        assert self._tables is not None
        self._ops.apply_penalties(
            logits, *self._tables, penalties.rows, penalties.slots, penalties.frequency, penalties.presence,
            penalties.repetition,
        )  # fmt: skip

    def add(self, tokens: Tensor, penalties: Penalties, drafts: Drafts | None = None) -> None:
        """Counts a step's tokens, int64 [R], for the rows that have penalties; with a draft, those of them that are not -1."""
        assert self._tables is not None
        turns = (
            [penalties] if drafts is None else [penalties.select(turn, self._ops) for turn in _turns(penalties, drafts)]
        )
        for each in turns:
            self._ops.count_tokens(*self._tables, tokens, each.rows, each.slots)

    def _apply_drafted(self, logits: Tensor, penalties: Penalties, drafts: Drafts) -> None:
        """Position by position, on a copy of the requests' counts that grows by the draft."""
        assert self._tables is not None
        turns = _turns(penalties, drafts)
        _, own = np.unique(drafts.owner[penalties.at], return_inverse=True)
        slots, tokens = self._ops.to_device(own), self._ops.to_device(drafts.tokens)
        grown = TokenCounts(len(turns[0]), self._shape[1], self._ops)
        first = penalties.slots.index_select(0, self._ops.to_device(turns[0]))
        grown._tables = self._tables[0].index_select(0, first), self._tables[1].index_select(0, first)
        for turn in turns:
            grown.apply(logits, penalties.select(turn, self._ops, slots))
            followed = turn[drafts.tokens[penalties.at[turn]] >= 0]
            if len(followed):
                grown.add(tokens, penalties.select(followed, self._ops, slots))


def _turns(penalties: Penalties, drafts: Drafts) -> list[IntArray]:
    """The penalised rows, as indices into ``penalties``: each request's first position, then its second, and so on."""
    offsets = drafts.offsets[penalties.at]
    return [np.flatnonzero(offsets == turn) for turn in range(int(offsets.max()) + 1)]
