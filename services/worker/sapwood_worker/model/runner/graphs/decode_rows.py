"""Turns a small step into rows of a decode graph: one row for each token to compute, be it a decode or part of a prompt.

A decode graph writes the keys and values of all its rows before any row attends, and a row sees the positions up to its own. So
a few tokens of a prompt, as rows with the request's pages and their own lengths, are computed as in a prefill: a prompt that is
cached but for its end costs one replay, not the launches of every layer's attention.

Cost: each row reads its request's keys by itself, where prefill reads them once for all rows; of prompts this pays for few keys
only. The tokens of a draft are rows whatever it costs, as a step by itself costs more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood_worker.records.step import IntArray, Step

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
        prompts: bool [T]: which rows are of prompts; None: none. To find what they share takes longer than to read their keys.
        left: int64 [T]: the slots where a head leaves what it makes of each token; None: it is no head.
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
        step: At least one part, and nothing wanted of it but sampled tokens.
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
        return DecodeRows(step.token_ids, step.starts, step.rows, step.pages, None, None)
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
    last = None if int(step.samples.sum()) == total else step.sampled()
    return DecodeRows(step.token_ids, positions, step.rows[owner], step.pages[owner], last, of_prompts)
