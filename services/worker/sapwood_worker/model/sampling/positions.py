"""Which positions a step samples: one for each request, or several where a draft of its next tokens is checked.

Position j of a request counts only if the tokens sampled before it are the draft's. So sampling takes the tokens before
position j from the draft, and all positions are sampled at once. The tokens after the first one that differs from the draft are
thrown away: on the device out of its state, on the host out of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.records.step import IntArray, Step

_NO_DRAFT = -2
"""The placeholder of a draft token; neither a sampled token nor -1 has this value."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft tokens after the R positions of S requests.

    Attributes:
        owner: int64 [R]: whose each position is, in 0 .. S - 1.
        offsets: int64 [R]: its place among its request's.
        tokens: int64 [R]: the token that the step computes there; -2 after a request's last.
        grid: int64 [S, most]: each request's positions as indices into R; its last one repeated.
    """

    owner: IntArray
    offsets: IntArray
    tokens: IntArray
    grid: IntArray

    def ends(self, sampled: Tensor, ops: DeviceOps) -> Tensor:
        """The last position of each request that counts, int64 [S] on the device, by the tokens sampled, int64 [R]."""
        grid = ops.to_device(self.grid)
        as_drafted = sampled == ops.to_device(self.tokens)
        return grid[:, 0] + as_drafted[grid].long().cumprod(1).sum(1)

    def counting(self, sampled: Tensor, ends: Tensor, ops: DeviceOps) -> Tensor:
        """``sampled`` with -1 at the positions that do not count."""
        after = torch.arange(len(sampled), device=ends.device) > ends[ops.to_device(self.owner)]
        return torch.where(after, -1, sampled)


@dataclass(frozen=True, slots=True)
class Positions:
    """The R positions that S requests sample in a step, request after request; last those of requests that have joined it.

    Attributes:
        rows: int64 [R]: rows of the page table.
        positions: int64 [R]: where the tokens to sample will be.
        parts: The S requests' indices among the step's parts; the step's joins count on from there.
        drafts: The draft tokens after the positions; None: each request has one position.
    """

    rows: IntArray
    positions: IntArray
    parts: Sequence[int]
    drafts: Drafts | None = None

    @staticmethod
    def of(step: Step) -> Positions:
        """The sampled positions of a step. O(parts)."""
        samples = step.samples
        if len(step.joins):
            rows = np.concatenate((step.rows[samples > 0], step.joins[:, 0]))
            count = len(samples)
            places = [*np.flatnonzero(samples).tolist(), *range(count, count + len(step.joins))]
            return Positions(rows, step.sampled_positions(), places)
        if len(step.token_ids) == len(samples) and samples.all():
            return Positions(step.rows, step.starts + 1, range(len(samples)))
        parts = np.flatnonzero(samples)
        rows, positions = np.repeat(step.rows, samples), step.sampled_positions()
        if len(rows) == len(parts):
            return Positions(rows, positions, parts.tolist())
        counts = samples[parts]
        firsts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(parts)), counts)
        tokens = step.token_ids.take(step.sampled() + 1, mode="clip")
        tokens[firsts + counts - 1] = _NO_DRAFT
        grid = firsts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        drafts = Drafts(owner, np.arange(len(rows)) - firsts[owner], tokens, grid)
        return Positions(rows, positions, parts.tolist(), drafts)
