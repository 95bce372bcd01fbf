"""Attention of chunks of prompts that share keys: over those the tokens of all who share them are one chunk.

Each request's tokens see two kinds of keys: those of shared runs, all of them, and the request's own, up to themselves. Two
attentions are planned for these, and their results are added by their sums of weights, which is exact except for rounding. So
chunks of few tokens fill the kernels' tiles: 64 requests of 16 tokens are eight tiles of 128 over their shared keys, not 64
tiles.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.attention.planned import IntArray, PagedKeys, PartAttention, SharedRuns, StoredPages
from sapwood_kernels.attention.triton_merge import add_parts
from sapwood_kernels.ops.device import DeviceOps


class SharedPrefillAttention:
    """Implements :class:`sapwood_kernels.attention.planned.PlannedAttention` for chunks of prompts, some of which share keys.

    Args:
        own: Computes chunks over their requests' own keys.
        common: Computes chunks over shared keys: not causal.
        page_size: Tokens in a page.
        ops: The device's operations.
    """

    def __init__(self, own: PartAttention, common: PartAttention, page_size: int, ops: DeviceOps) -> None:
        self._own, self._common, self._page_size, self._ops = own, common, page_size, ops
        self._asked: Tensor
        self._levels: list[int] = []

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        assert keys.runs is not None
        runs, size = by_level(keys.runs), self._page_size
        rows, begins = (each.numpy().astype(np.int64) for each in (query_indptr, keys.indptr))
        covered = np.zeros(len(begins) - 1, np.int64)
        for first, count, end in zip(runs.first, runs.count, runs.end, strict=True):
            covered[runs.order[first : first + count]] = end // size
        first_member = runs.order[runs.first]
        members = runs.order[_stretches(runs.first, runs.first + runs.count)]
        tokens = np.diff(rows)[members]
        ends = np.cumsum(tokens)[np.cumsum(runs.count) - 1]  # of each run, among all rows that see shared keys
        own_pages = _stretches(begins[:-1] + covered, begins[1:])
        common_pages = _stretches(begins[first_member] + runs.begin // size, begins[first_member] + runs.end // size)
        self._asked = self._ops.to_device(_stretches(rows[members], rows[members + 1]).astype(np.int32))
        pages = self._ops.to_device(np.concatenate((own_pages, common_pages)).astype(np.int32))
        own, common = pages[: len(own_pages)], pages[len(own_pages) :]
        self._own.plan(
            query_indptr,
            PagedKeys(_indptr(np.diff(begins) - covered), keys.indices.index_select(0, own), keys.last_page_len),
        )
        counts = (runs.end - runs.begin) // size
        full = torch.full((len(counts),), size, dtype=torch.int32)
        self._common.plan(
            _indptr(np.diff(ends, prepend=0)), PagedKeys(_indptr(counts), keys.indices.index_select(0, common), full)
        )
        last = np.flatnonzero(np.diff(_depths(runs), append=-1))
        self._levels = ends[last].tolist()

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        result = self._own.run(query, cache, out, sums)
        asked = query.index_select(0, self._asked)
        part_sums = torch.empty(asked.shape[:2], dtype=torch.float32, device=query.device)
        part = self._common.run(asked, cache, None, part_sums)
        for first, end in itertools.pairwise((0, *self._levels)):  # a token is once in each
            add_parts(result, sums, part, part_sums, self._asked, first, end - first)
        return result


def by_level(runs: SharedRuns) -> SharedRuns:
    """The same runs in order: those that begin at the first key, then those that follow one of these, and so on."""
    order = np.argsort(_depths(runs), kind="stable")
    return SharedRuns(runs.order, *(each[order] for each in (runs.first, runs.count, runs.begin, runs.end)))


def _depths(runs: SharedRuns) -> IntArray:
    """int64 [R]: how many runs come before each, on the way from the first key."""
    passed = np.zeros(len(runs.order), np.int64)
    depths = np.zeros(len(runs.first), np.int64)
    for number, (first, count) in enumerate(zip(runs.first, runs.count, strict=True)):
        depths[number] = passed[first]
        passed[first : first + count] += 1
    return depths


def _stretches(begins: IntArray, ends: IntArray) -> IntArray:
    """The numbers from each beginning up to its end, one stretch after the other."""
    counts = ends - begins
    return np.repeat(ends - np.cumsum(counts), counts) + np.arange(int(counts.sum()))


def _indptr(counts: IntArray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
