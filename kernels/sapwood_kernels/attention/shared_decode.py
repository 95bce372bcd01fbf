"""Decode attention that reads what requests share once for all of them, by our own kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, SharedRuns, Variant
from sapwood_kernels.attention.shared.items import FIELDS, SLOTS, cut_runs
from sapwood_kernels.attention.shared.triton_shared import tile_requests
from sapwood_kernels.attention.split_decode import SplitDecodeAttention
from sapwood_kernels.attention.triton_decode import SharedWork
from sapwood_kernels.ops.device import DeviceOps

ITEMS = 256
"""The most items of a step: each has a program for every key/value head, also where it is not needed."""


class SharedDecodeAttention(SplitDecodeAttention):
    """Implements ``PlannedAttention`` for one token of each request. Some of the first requests share keys: ``keys.runs`` says
    which. Arguments as :class:`SplitDecodeAttention`'s."""

    def __init__(
        self, batch: int | None, indices: Tensor, shape: AttentionShape, variant: Variant, ops: DeviceOps
    ) -> None:
        super().__init__(batch, indices, shape, variant, ops)
        self._runs: SharedRuns | None = None
        if batch is not None:  # all in one tensor, which is filled by one copy
            self._plan = torch.zeros(ITEMS * FIELDS + 3 * batch, dtype=torch.int32, device=ops.device)
            self._shared = _work(self._plan, batch)

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        super().plan(query_indptr, keys)
        if keys.runs is not None and keys.runs is self._runs:
            return  # nobody has come or gone
        self._runs = keys.runs
        shape, batch = self._shape, len(keys.last_page_len)
        plan = np.zeros(ITEMS * FIELDS + 3 * batch, np.int32)
        order, starts, counts = plan[ITEMS * FIELDS :].reshape(3, -1)
        if keys.runs is not None:
            tile, programs = self._tile(batch)
            cut = cut_runs(
                keys.runs,
                page_size=shape.page_size,
                tile=tile,
                kv_heads=programs,
                processors=self._ops.processors,
                most=ITEMS,
            )
            plan[: cut.items.size] = cut.items.ravel()
            known = len(keys.runs.order)  # rows that pad a graph's batch share nothing
            order[:known], starts[:known], counts[:known] = keys.runs.order, cut.starts, cut.counts
        if self._fixed:
            self._ops.fill(self._plan, plan)
        else:
            self._shared = _work(self._ops.to_device(plan), batch)

    def _tile(self, batch: int) -> tuple[int, int]:
        """Requests of an item, and its programs."""
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        return tile_requests(heads // kv_heads, self._shape.head_dim, batch), kv_heads


def _work(plan: Tensor, batch: int) -> SharedWork:
    items, rest = plan[: ITEMS * FIELDS], plan[ITEMS * FIELDS :]
    order, starts, counts = rest.view(3, batch)
    return SharedWork(order, items.view(ITEMS, FIELDS), starts, counts, SLOTS)
