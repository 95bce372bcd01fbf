"""Frequency, presence and repetition penalties, and the counts of tokens that they need.

The counts are dense, one row of the vocabulary for each row of the page table, and stay on the device: a row is filled when a
request with penalties first samples in it, and then counts each token right where it was sampled. No memory is taken before
the first such request.

Source of the formulas: OpenAI's API reference (frequency, presence: over the output), Keskar et al., "CTRL", 2019, as in
transformers (repetition: over prompt and output).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_common.contract.sampling import LONGEST_BAD_WORD
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
        """Counts a row's tokens again from the start.

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
        """Counts a step's tokens, int64 [R], for the rows that have penalties; with drafts, tokens of -1 are skipped."""
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


# Forbids tokens: all but an allowed set, or those that would complete a banned sequence of tokens.
#
# Like the counts of penalties, the state stays on the device, one row for each row of the page table. A row is written
# when a request with bans first samples in it, and records each token where it was sampled, so that a step need not
# wait for the host to know the token before. No memory is taken before the first such request.


_ANY, _NONE = -2, -1
"""Two placeholders for a token id: the first equals every token, the second equals none."""


@dataclass(frozen=True, slots=True)
class Places:
    """S of the R rows of a step.

    Attributes:
        at: int64 [S], on the host: the rows of the logits.
        logits: int64 [S]: the same on the device.
        rows: int64 [S]: the rows of the page table that they belong to.
    """

    at: IntArray
    logits: Tensor
    rows: Tensor


class AllowedTokens:
    """The only tokens that a row may sample, for rows whose request lists them.

    Args:
        rows: Rows of the page table.
        vocab_size: Number of tokens.
        ops: The operations of the logits' device.
    """

    def __init__(self, rows: int, vocab_size: int, ops: DeviceOps) -> None:
        self._shape = rows, -(-vocab_size // 32)
        self._ops = ops
        self._masks: Tensor | None = None
        """int32 [rows, words]: bit ``i % 32`` of word ``i // 32`` for token i."""

    def enter(self, row: int, allowed: Sequence[int]) -> None:
        """Sets the tokens that a row may sample."""
        if self._masks is None:
            self._masks = torch.zeros(self._shape, dtype=torch.int32, device=self._ops.device)
        bits = np.zeros(self._shape[1] * 32, np.uint8)
        bits[list(allowed)] = 1
        self._masks[row] = self._ops.to_device(np.packbits(bits, bitorder="little").view(np.int32))

    def apply(self, logits: Tensor, places: Places) -> None:
        """Forbids all other tokens in some rows of the logits, float32 [R, V], in place."""
        assert self._masks is not None
        self._ops.forbid_tokens(logits, self._masks.index_select(0, places.rows), places.logits)


class BannedSequences:
    """Sequences of tokens that no token of output may complete, and the last tokens of each row's output.

    A sequence is stored as its tokens but the last, aligned to the right; a shorter one is padded at the left with entries that
    match anything. A step costs O(S rows x most sequences of any row x the longest one's length).

    Args:
        rows: Rows of the page table.
        ops: The operations of the logits' device.
    """

    def __init__(self, rows: int, ops: DeviceOps) -> None:
        self._ops = ops
        self._tails = torch.empty(0)
        """int32 [rows, LONGEST_BAD_WORD - 1]: the latest tokens at the right."""
        self._before = torch.empty((rows, 0, 0), dtype=torch.int32, device=ops.device)
        """int32 [rows, sequences, length]: the tokens before each sequence's last."""
        self._last = torch.empty((rows, 0), dtype=torch.int64, device=ops.device)
        """int64 [rows, sequences]: each sequence's last token; -1: there is no such sequence."""

    def enter(self, row: int, sequences: Sequence[Sequence[int]], output: array[int]) -> None:
        """Sets the sequences of a row.

        Args:
            row: The row of the page table.
            sequences: Each of 1 to LONGEST_BAD_WORD tokens.
            output: The tokens that its request has generated so far.
        """
        self._widen(len(sequences), max(map(len, sequences)) - 1)
        _, count, length = self._before.shape
        before, last = np.full((count, length), _ANY, np.int32), np.full(count, -1, np.int64)
        for index, sequence in enumerate(sequences):
            *head, last[index] = sequence
            before[index, length - len(head) :] = head
        tail = np.full(LONGEST_BAD_WORD - 1, _NONE, np.int32)
        recent = output[-len(tail) :]
        tail[len(tail) - len(recent) :] = recent
        self._before[row] = self._ops.to_device(before)
        self._last[row] = self._ops.to_device(last)
        self._tails[row] = self._ops.to_device(tail)

    def apply(self, logits: Tensor, places: Places, drafts: Drafts | None = None) -> None:
        """Forbids, in place, what would complete a sequence in some rows of the logits, [R, V]; a draft counts as sampled."""
        before, last = self._before.index_select(0, places.rows), self._last.index_select(0, places.rows)
        tails = self._tails.index_select(0, places.rows)
        if drafts is not None:
            offsets = drafts.offsets[places.at]
            drafted = drafts.tokens[drafts.grid[drafts.owner[places.at]]].astype(np.int32)
            tails = _shifted(tails, self._ops.to_device(drafted), self._ops.to_device(offsets))
        tails = tails[:, None, LONGEST_BAD_WORD - 1 - before.shape[2] :]
        complete = ((before == tails) | (before == _ANY)).all(-1) & (last >= 0)
        at = places.logits[:, None] * logits.shape[1] + last.clamp(min=0)
        values = torch.where(complete, -torch.inf, 0.0)
        logits.view(-1).scatter_add_(0, at.flatten(), values.flatten())

    def add(self, tokens: Tensor, places: Places, drafts: Drafts | None = None) -> None:
        """Records a step's tokens, int64 [R], in rows that have sequences; with drafts, tokens of -1 are skipped."""
        rows = places.rows
        if drafts is None:
            new = tokens.index_select(0, places.logits)[:, None].int()
            tails = torch.cat((self._tails.index_select(0, rows)[:, 1:], new), 1)
        else:
            first = np.flatnonzero(drafts.offsets[places.at] == 0)
            grid = self._ops.to_device(drafts.grid[drafts.owner[places.at[first]]])
            rows = rows.index_select(0, self._ops.to_device(first))
            new = tokens[grid]
            # A request's last position stands in the grid once for each that another has more; it counts once.
            again = torch.zeros_like(grid, dtype=torch.bool)
            again[:, 1:] = grid[:, 1:] == grid[:, :-1]
            tails = _shifted(self._tails.index_select(0, rows), new.int(), ((new >= 0) & ~again).sum(1))
        self._tails.index_copy_(0, rows, tails)

    def _widen(self, count: int, length: int) -> None:
        """Makes room for this many sequences, each with up to ``length`` tokens before its last."""
        rows, had, width = self._before.shape
        if not self._tails.numel():
            shape = rows, LONGEST_BAD_WORD - 1
            self._tails = torch.full(shape, _NONE, dtype=torch.int32, device=self._ops.device)
        if count > had or length > width:
            count, length = max(count, had), max(length, width)
            pad = torch.nn.functional.pad
            self._before = pad(self._before, (length - width, 0, 0, count - had), value=_ANY)
            self._last = pad(self._last, (0, count - had), value=-1)


def _shifted(tails: Tensor, new: Tensor, by: Tensor) -> Tensor:
    """Each row's last tokens, int32 [S, N], once the first ``by`` of its new ones, int32 [S, M], have come."""
    at = torch.arange(tails.shape[1], device=tails.device)[None] + by[:, None]
    return torch.cat((tails, new), 1).gather(1, at)
