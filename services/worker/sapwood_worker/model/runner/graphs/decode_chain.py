"""Decodes of the same requests one after another, each of the token that the one before found: what the host would prepare for
each of them, prepared for all at once, so that the device need not wait for the host in between.

A head's step takes an H200 0.25 ms, and the host as long to prepare it. In a chain only the first is prepared; for the others a
copy on the device brings positions and slots, and the attention's plan is moved by a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood_worker.model.runner.graphs.decode_rows import DecodeRows
from sapwood_worker.records.step import IntArray


@dataclass(frozen=True, slots=True)
class StagedChain:
    """K steps on graph buffers of S columns, of which the first B are the requests of the first step, in order.

    Attributes:
        inputs: int64 [K, N, S]: the graph's inputs in each step. Columns that a step does not compute write to scratch.
        lengths: int64 [S]: the keys of each column in the last step, those that are left out by then counted on; in the step
            before there was one less.
        pages: int32 [S, W]: the pages of so many keys, scratch where a request has no more.
        columns: For each step the columns that it computes, in its own order.
    """

    inputs: IntArray
    lengths: IntArray
    pages: npt.NDArray[np.int32]
    columns: list[IntArray]


def stage_chain(steps: Sequence[DecodeRows], size: int, page_size: int, scratch: int) -> StagedChain:
    """Prepares a chain. O(steps * size), vectorised over the requests.

    Args:
        steps: At least one; each has some of the rows of the first one, a position further than in the step before, and no other.
        size: Columns.
        page_size: Tokens in a page.
        scratch: The first slot of the page that nobody has.
    """
    first, count, many = steps[0], len(steps[0].slots), len(steps)
    order = np.argsort(first.slots)
    headed = first.left is not None
    inputs = np.zeros((many, 4 + headed, size), np.int64)
    inputs[:, 3:] = scratch
    last = first.positions.copy()
    columns: list[IntArray] = []
    for at, step in enumerate(steps):
        own = order[np.searchsorted(first.slots, step.slots, sorter=order)]
        page = step.pages[np.arange(len(own)), step.positions // page_size].astype(np.int64)
        inputs[at, 0, own], inputs[at, 1, own], inputs[at, 2, own] = step.token_ids, step.positions, step.slots
        inputs[at, 3, own] = page * page_size + step.positions % page_size
        if step.left is not None:
            inputs[at, 4, own] = step.left
        last[own] = step.positions
        columns.append(own)
    lengths = np.full(size, many, np.int64)
    lengths[:count] = first.positions + many
    wide = -(-int(lengths.max()) // page_size)
    pages = np.full((size, wide), scratch // page_size, np.int32)
    known = min(wide, first.pages.shape[1])
    there = np.arange(known) <= last[:, None] // page_size
    pages[:count, :known] = np.where(there, first.pages[:, :known], scratch // page_size)
    return StagedChain(inputs, lengths, pages, columns)
