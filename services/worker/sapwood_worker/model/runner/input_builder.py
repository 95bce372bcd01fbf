"""Builds a :class:`ForwardBatch` from a scheduler step: numpy on the host, then one copy of each array to the device."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch, in_tables
from sapwood_worker.model.runner.forward_batch import ForwardBatch
from sapwood_worker.records.step import IntArray, Step


def build_forward_batch(
    step: Step, page_size: int, ops: DeviceOps, last_tokens: Tensor | None = None, tables: int = 1
) -> ForwardBatch:
    """The step's input; O(tokens), no Python loop over parts, tokens' positions or pages.

    Args:
        step: At least one part.
        page_size: Tokens in a page.
        ops: The operations of the device that tensors go to.
        last_tokens: int64 [rows of the page table] on the device: each row's latest token, used where the host does not know it.
        tables: Page tables that the step's pages are of.
    """
    count, total = len(step.rows), len(step.token_ids)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(step.counts, out=starts[1:])
    owner = np.repeat(np.arange(count), step.counts)
    positions = np.arange(total) + (step.starts - starts[:-1])[owner]

    def move(array: IntArray) -> Tensor:
        return ops.to_device(array)

    tokens = move(step.token_ids)
    unknown = np.flatnonzero(step.token_ids < 0)
    if len(unknown):
        assert last_tokens is not None, "a token is not known"
        tokens = tokens.index_copy(0, move(unknown), last_tokens.index_select(0, move(step.rows[owner[unknown]])))
    batches = [
        AttentionBatch(
            query_starts=starts,
            seq_lens=step.starts + step.counts,
            page_table=pages,
            cache_slots=move(pages[owner, positions // page_size].astype(np.int64) * page_size + positions % page_size),
        )
        for pages in step.pages.reshape(count, tables, -1).swapaxes(0, 1)
    ]
    return ForwardBatch(
        token_ids=tokens,
        positions=move(positions),
        attention=in_tables(batches),
    )
