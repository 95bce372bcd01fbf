"""The input of one forward pass, flat over requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch, in_tables
from sapwood_worker.model.pools.state_pool import StatePool
from sapwood_worker.records.step import Step


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens, request after request.

    Attributes:
        lines: int64 [2 + page tables, T]: token ids, positions, and each table's cache slots.
        attention: Which tokens belong to which request, and where the cache keeps their keys and values.
    """

    lines: Tensor
    attention: AttentionBatch

    @property
    def token_ids(self) -> Tensor:
        """int64 [T]."""
        return self.lines[0]

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""
        return self.lines[1]


# Builds a :class:`ForwardBatch` from a scheduler step: numpy on the host, then one copy to the device.


_ALIGNED = 2
"""Lines of the input buffer are padded to a multiple of this many tokens: kernels are compiled for addresses that 16 divides."""


def build_forward_batch(
    step: Step,
    page_size: int,
    ops: DeviceOps,
    last_tokens: Tensor | None = None,
    tables: int = 1,
    states: StatePool | None = None,
    scratch: Sequence[int] = (),
) -> ForwardBatch:
    """The step's input; O(tokens), no Python loop over parts, tokens' positions or pages.

    Args:
        step: At least one part.
        page_size: Tokens in a page.
        ops: The operations of the device that tensors go to.
        last_tokens: int64 [rows of the page table] on the device: each row's latest token, used if the host does not know it.
        tables: Page tables that the step's pages are of.
        states: The states; None: no layer keeps one.
        scratch: A slot of each table for keys and values that are not to be kept; only needed if the step has such tokens.
    """
    count, total = len(step.rows), len(step.token_ids)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(step.counts, out=starts[1:])
    owner = np.repeat(np.arange(count), step.counts)
    lines = np.zeros((2 + tables, total + total % _ALIGNED), np.int64)
    lines[0, :total] = step.token_ids
    lines[1, :total] = positions = np.arange(total) + (step.starts - starts[:-1])[owner]
    pages = step.pages.reshape(count, tables, -1).swapaxes(0, 1)
    lines[2:, :total] = pages[:, owner, positions // page_size].astype(np.int64) * page_size + positions % page_size
    if len(step.again):  # their keys and values are there already
        kept = np.arange(total) - starts[:-1][owner] < step.again[owner]
        lines[2:, :total][:, kept] = np.array(scratch, np.int64)[:, None]
    unknown = np.flatnonzero(step.token_ids < 0)
    # One copy: each takes the host 15 us, and before a prompt's first layer the device waits for it.
    moved = ops.to_device(np.concatenate((lines.ravel(), unknown, step.rows[owner[unknown]])))
    on_device = moved[: lines.size].view(lines.shape)[:, :total]
    if len(unknown):
        assert last_tokens is not None, "a token is not known"
        at, rows = moved[lines.size :].view(2, -1)
        on_device[0].index_copy_(0, at, last_tokens.index_select(0, rows))
    batches = [
        AttentionBatch(query_starts=starts, seq_lens=step.starts + step.counts, page_table=table, cache_slots=slots)
        for table, slots in zip(pages, on_device[2:], strict=True)
    ]
    batch = in_tables(batches)
    if states is not None:
        batch = replace(batch, states=states.plan(step.rows, step.counts, step.saves, ops))
    return ForwardBatch(on_device, batch)
