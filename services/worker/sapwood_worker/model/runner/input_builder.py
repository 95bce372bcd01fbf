"""Builds a :class:`ForwardBatch` from a scheduler step: numpy on the host, then one copy of each array to the device."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch
from sapwood_worker.model.runner.forward_batch import ForwardBatch
from sapwood_worker.records.step import SchedulerOutput

IntArray = npt.NDArray[np.int64]


def build_forward_batch(
    output: SchedulerOutput, page_size: int, ops: DeviceOps, last_tokens: Tensor | None = None
) -> ForwardBatch:
    """The step's input; O(tokens), no Python loop over tokens' positions or pages.

    Args:
        output: At least one request, each with at least one token.
        page_size: Tokens in a page.
        ops: The operations of the device that tensors go to.
        last_tokens: int64 [rows of the page table] on the device: each row's latest token, used where the host does not know it.
    """
    requests = output.requests
    count = len(requests)
    lengths = np.fromiter((len(request.token_ids) for request in requests), np.int64, count)
    begins = np.fromiter((request.start for request in requests), np.int64, count)
    slots = np.fromiter((request.slot for request in requests), np.int64, count)
    samples = np.fromiter((request.samples for request in requests), np.bool_, count)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    total = int(starts[-1])
    token_ids = np.fromiter(chain.from_iterable(request.token_ids for request in requests), np.int64, total)
    owner = np.repeat(np.arange(count), lengths)
    positions = np.arange(total) + np.repeat(begins - starts[:-1], lengths)
    pages = output.page_table[slots]
    cache_slots = pages[owner, positions // page_size].astype(np.int64) * page_size + positions % page_size
    last_rows = starts[1:][samples] - 1

    def move(array: IntArray) -> Tensor:
        return ops.to_device(array)

    tokens = move(token_ids)
    unknown = np.flatnonzero(token_ids < 0)
    if len(unknown):
        assert last_tokens is not None, "a token is not known"
        tokens = tokens.index_copy(0, move(unknown), last_tokens.index_select(0, move(slots[owner[unknown]])))
    return ForwardBatch(
        token_ids=tokens,
        positions=move(positions),
        attention=AttentionBatch(
            query_starts=starts, seq_lens=begins + lengths, page_table=pages, cache_slots=move(cache_slots)
        ),
        logit_rows=None if len(last_rows) == total else move(last_rows),
    )
