"""Turns a small step into rows of a decode graph: one row for each token to compute, of a decode or of a prompt.

A decode graph writes the keys and values of all its rows before any row attends, and a row sees the positions up to its own. So
a few tokens of a prompt, as rows with the request's pages and their own lengths, are computed as in a prefill: a prompt whose
end only is not cached costs one replay, not the launches of every layer's attention.

Cost: each row reads its request's keys by itself, where prefill reads them once for all rows; for prompts this pays only if
there are few keys. The tokens of a draft always become rows, because a separate step costs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps, Moment
from sapwood_worker.records.step import LATE, IntArray, Step

MOST_KEYS = 28 * 32768
"""Keys that the rows of prompts may read, over all layers: 8 heads of 128 take 0.9 ms on an H200, less than is saved."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The T tokens of a step.

    Attributes:
        token_ids: [T]; -1 for a token that only the device knows.
        positions: [T].
        slots: [T]: the row of the page table of each token's request.
        pages: int32 [T, W]: each token's pages.
        last: [R]: the rows after which the step samples; None: all rows, in order.
        prompts: bool [T]: which rows are of prompts; None: none. Finding their shared keys takes longer than reading them.
        left: int64 [T]: the slots for a draft head's output of each token; None: it is no head.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    pages: npt.NDArray[np.int32]
    last: IntArray | None
    prompts: npt.NDArray[np.bool_] | None
    left: IntArray | None = None


def decode_rows(
    step: Step, page_size: int, most_rows: int, most_pages: int, *, prompts: bool = True, layers: int = 28
) -> DecodeRows | None:
    """The rows of a step, or None if it does not fit. O(rows).

    Args:
        step: At least one part; only sampled tokens are wanted of it.
        page_size: Tokens in a page.
        most_rows: Rows of the largest graph.
        most_pages: The most pages that the rows may name together.
        prompts: Whether parts of more than one token, or that sample nothing, may be among them.
        layers: The model's layers.
    """
    total, counts = len(step.token_ids), step.counts
    if total > most_rows:
        return None
    if total == len(counts) and step.samples.all():
        last = step.sampled() if len(step.joins) else None
        return DecodeRows(step.token_ids, step.starts, step.rows, step.pages, last, None)
    if not prompts:
        return None
    owner = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(total) + (step.starts - np.cumsum(counts) + counts)[owner]
    keys = positions + 1
    prompts_of = counts > step.samples  # a draft's tokens are all sampled after
    of_prompts = prompts_of[owner] if prompts_of.any() else None
    read = 0 if of_prompts is None else int(keys[of_prompts & (counts > 1)[owner]].sum())
    if read * layers > MOST_KEYS or int((-(-keys // page_size)).sum()) > most_pages:
        return None
    last = None if int(step.samples.sum()) == total and not len(step.joins) else step.sampled()
    return DecodeRows(step.token_ids, positions, step.rows[owner], step.pages[owner], last, of_prompts)


# The draft of a chain of decodes. The host need not know it to have it checked.


class DraftedTokens:
    """Implements :class:`sapwood_worker.records.step.LateTokens`; the copy to the host begins at construction.

    Args:
        steps: int64 [B] of each step: the tokens; less than 0 for an unknown token.
        ops: The operations of their device.
        begun: When the device began to make them.

    Attributes:
        begun: The argument.
        share: The part of their time that :meth:`seconds` returns: less than 1 if fewer tokens are used than were made.
        tokens: int64 [K * B] on the device, step after step; 0 for an unknown token.
    """

    def __init__(self, steps: Sequence[Tensor], ops: DeviceOps, begun: Moment) -> None:
        self.tokens = torch.cat(list(steps)).clamp(min=0)
        self._ops = ops
        self.share = 1.0
        self.begun, self._ended = begun, ops.moment()
        self._copies = ops.to_host([self.tokens])

    def wait(self) -> IntArray:
        found: IntArray = self._copies.wait()[0].numpy()
        return found

    def seconds(self) -> float:
        return self._ended.seconds_since(self.begun) * self.share

    def rows_of(self, token_ids: IntArray) -> tuple[Tensor, Tensor]:
        """The late tokens that a step's tokens stand for: their places in the step and their ids, both int64 [N] on the
        device."""
        rows = np.flatnonzero(token_ids <= LATE)
        places, which = self._ops.to_device(np.stack((rows, LATE - token_ids[rows])))
        return places, self.tokens.index_select(0, which)


# A chain of decodes of the same requests: each computes the token that the one before has sampled. The host prepares
# all of them at once, so that the device need not wait for the host in between.
# A head's step takes an H200 0.25 ms, and the host needs the same time to prepare it. In a chain the host prepares nothing
# between steps: a copy on the device brings positions and slots, and the attention's plan is moved by a key.


@dataclass(frozen=True, slots=True)
class StagedChain:
    """K steps on graph buffers of S columns; the first B columns are the requests, in order.

    Attributes:
        inputs: int64 [K, N, S]: the graph's inputs in each step. Columns that a step does not compute write to scratch.
        lengths: int64 [S]: the keys of each column in the last step, as if all columns ran to the end; in each earlier step
            there is one key less.
        pages: int32 [S, W]: the pages of each request's keys, then the scratch page.
    """

    inputs: IntArray
    lengths: IntArray
    pages: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LateStart:
    """Where a chain begins, which only the device knows.

    Attributes:
        offsets: int64 [B]: how many positions later each request begins than the host says.
        most: The largest that any of these may be.
        steps: Steps of the chain.
    """

    offsets: Tensor
    most: int
    steps: int


def stage_chain(
    first: DecodeRows, wanted: IntArray, size: int, page_size: int, scratch: int, steps: int
) -> StagedChain:
    """Prepares a chain. Vectorised, O(steps * size).

    Args:
        first: The decodes of the first step, with pages for all steps. A draft head leaves its output in the slot after the
            token's own.
        wanted: int64 [B]: for how many steps each request runs, 0 or more.
        size: Columns.
        page_size: Tokens in a page.
        scratch: The first slot of the page that nobody has.
        steps: How many steps to run; at least the largest number in ``wanted``.
    """
    count, many = len(first.slots), steps
    headed = first.left is not None
    places = np.arange(many)[:, None]
    runs, positions = places < wanted, first.positions + places
    inputs = np.zeros((many, 4 + headed, size), np.int64)
    inputs[:, 3:] = scratch
    of_requests = inputs[:, :, :count]
    of_requests[:, 0] = np.where(runs, -1, 0)
    of_requests[:, 1] = np.where(runs, positions, 0)
    of_requests[:, 2] = first.slots
    for row in range(3, 4 + headed):
        at = np.where(runs, positions + row - 3, 0)
        slots = first.pages[np.arange(count), at // page_size].astype(np.int64) * page_size + at % page_size
        of_requests[:, row] = np.where(runs, slots, scratch)
    lengths = np.full(size, many, np.int64)
    lengths[:count] = first.positions + many
    wide = -(-int(lengths.max()) // page_size)
    pages = np.full((size, wide), scratch // page_size, np.int32)
    known = min(wide, first.pages.shape[1])
    there = np.arange(known) <= (first.positions + wanted - 1)[:, None] // page_size
    pages[:count, :known] = np.where(there, first.pages[:, :known], scratch // page_size)
    return StagedChain(inputs, lengths, pages)
