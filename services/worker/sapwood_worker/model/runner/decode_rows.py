"""Turns a small step into rows of a decode graph: one row for each token to compute, be it a decode or part of a prompt.

A decode graph writes the keys and values of all its rows before any row attends, and a row sees the positions up to its own. So
a few tokens of a prompt, as rows with the request's pages and their own lengths, are computed as in a prefill: a prompt that is
cached but for its end costs one replay, not the launches of every layer's attention.

Cost: each row reads its request's keys by itself, where prefill reads them once for all rows; this pays for few keys only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from sapwood_worker.records.step import ScheduledRequest

IntArray = npt.NDArray[np.int64]

MOST_KEYS = 32768
"""Keys that the rows of prompts may read: that takes 0.9 ms for 28 layers of 8 heads of 128 on an H200, less than is saved."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The T tokens of a step.

    Attributes:
        token_ids: [T]; -1 for a token that only the device knows.
        positions: [T].
        slots: [T]: the row of the page table of each token's request.
        sampled: Indices of the requests that sample.
        last: [R]: the rows after which those requests sample; None: all rows, in order.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    sampled: Sequence[int]
    last: IntArray | None


def decode_rows(
    requests: Sequence[ScheduledRequest], page_size: int, most_rows: int, most_pages: int, *, prompts: bool = True
) -> DecodeRows | None:
    """The rows of a step, or None if it does not fit or wants more than sampled tokens. O(requests + rows).

    Args:
        requests: At least one.
        page_size: Tokens in a page.
        most_rows: Rows of the largest graph.
        most_pages: The most pages that the rows may name together.
        prompts: Whether parts of prompts may be among them.
    """
    count = len(requests)
    if count > most_rows:
        return None
    begins = np.fromiter((request.start for request in requests), np.int64, count)
    slots = np.fromiter((request.slot for request in requests), np.int64, count)
    if all(len(request.token_ids) == 1 and request.samples for request in requests):
        token_ids = np.fromiter((request.token_ids[0] for request in requests), np.int64, count)
        return DecodeRows(token_ids, begins, slots, range(count), None)
    if not prompts:
        return None
    lengths = np.fromiter((len(request.token_ids) for request in requests), np.int64, count)
    total = int(lengths.sum())
    if total > most_rows or any(_wants_hidden(request) for request in requests):
        return None
    ends = np.cumsum(lengths)
    positions = np.arange(total) + np.repeat(begins - ends + lengths, lengths)
    keys = positions + 1
    if int(keys[np.repeat(lengths > 1, lengths)].sum()) > MOST_KEYS or int((-(-keys // page_size)).sum()) > most_pages:
        return None
    token_ids = np.fromiter(chain.from_iterable(request.token_ids for request in requests), np.int64, total)
    samples = np.fromiter((request.samples for request in requests), np.bool_, count)
    sampled = np.flatnonzero(samples).tolist()
    return DecodeRows(token_ids, positions, np.repeat(slots, lengths), sampled, ends[samples] - 1)


def _wants_hidden(request: ScheduledRequest) -> bool:
    """Whether the hidden states of a request's tokens are needed for more than the next token."""
    about_prompt = request.prompt_logprobs is not None and request.start + 1 < request.prompt_length
    return about_prompt or bool(request.pooling)
