"""A chain of decodes of the same requests: each computes the token that the one before has sampled. The host prepares all of
them at once, so that the device need not wait for the host in between.

A head's step takes an H200 0.25 ms, and the host as long to prepare it. In a chain nothing is prepared between the steps: a copy
on the device brings positions and slots, and the attention's plan is moved by a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_worker.model.runner.graphs.decode_rows import DecodeRows
from sapwood_worker.records.step import IntArray


@dataclass(frozen=True, slots=True)
class StagedChain:
    """K steps on graph buffers of S columns, of which the first B are the requests, in order.

    Attributes:
        inputs: int64 [K, N, S]: the graph's inputs in each step. Columns that a step does not compute write to scratch.
        lengths: int64 [S]: the keys of each column in the last step, counted on for columns that are left out by then; in the
            step before each has one less.
        pages: int32 [S, W]: the pages of so many keys, scratch where a request has no more.
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
        first: The decodes of the first step, with pages for all steps. A head's leave what they make in the slot after their own.
        wanted: int64 [B]: for how many steps each goes on, 0 or more.
        size: Columns.
        page_size: Tokens in a page.
        scratch: The first slot of the page that nobody has.
        steps: How many steps; as many as any goes on, or more.
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
