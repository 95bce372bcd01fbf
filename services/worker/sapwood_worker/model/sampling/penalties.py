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


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of S of the R rows of a step.

    Attributes:
        rows: int64 [S]: the rows of the logits.
        slots: int64 [S]: the rows of the page table, under which tokens are counted.
        frequency: float32 [S, 1].
        presence: float32 [S, 1].
        repetition: float32 [S, 1], over 0.
    """

    rows: Tensor
    slots: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor


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

    def apply(self, logits: Tensor, penalties: Penalties) -> None:
        """Changes the logits [R, V] of the rows that have penalties, in place."""
        assert self._tables is not None
        self._ops.apply_penalties(
            logits, *self._tables, penalties.rows, penalties.slots, penalties.frequency, penalties.presence,
            penalties.repetition,
        )  # fmt: skip

    def add(self, tokens: Tensor, penalties: Penalties) -> None:
        """Counts a step's tokens, int64 [R], for the rows that have penalties."""
        assert self._tables is not None
        self._ops.count_tokens(*self._tables, tokens, penalties.rows, penalties.slots)
