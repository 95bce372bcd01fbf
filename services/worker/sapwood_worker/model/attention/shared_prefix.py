"""Finds which requests of a step share which pages, in their page tables: every row that uses a page of the prefix cache names
it. So the ranks of a group all find the same, and a step need not say it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sapwood_kernels.attention.planned import IntArray, SharedRuns
from sapwood_worker.model.attention.backend import PromptOrder

Runs = tuple[SharedRuns | None, ...]
"""What requests share in each page table."""

LEAST_SPARED = 8192
"""Keys whose reading has to be spared for sharing to pay: to read so many takes as long as the additional kernel in each
layer."""
_LEAST_RUN = 128
"""Keys of the shortest run that is read for itself."""
_LEVELS = 8
"""The most branchings on a request's way; below, requests read by themselves."""


class _Found:
    """What a page table's requests share, for as long as they are the same.

    Args:
        table: The page table.
        page_size: Tokens in a page.
        whole: int64 [B]: pages of each request that others may have.
        runs: What was found in it; None: nothing.
    """

    def __init__(self, table: npt.NDArray[np.int32], page_size: int, whole: IntArray, runs: SharedRuns | None) -> None:
        self.runs = runs
        self._longest = -(-_LEAST_RUN // page_size)
        if runs is None:  # two with so many pages in common would have a run
            self._ends = np.minimum(whole, self._longest)
        else:
            self._ends = np.zeros(len(table), np.int64)
            for first, count, end in zip(runs.first, runs.count, runs.end // page_size, strict=True):
                self._ends[runs.order[first : first + count]] = end
        columns = int(self._ends.max())
        # A request that shares nothing is known by its first page, so that another in its place is noticed.
        self._others = np.arange(columns) >= np.maximum(self._ends, 1)[:, None]
        self._pages = table[:, :columns].copy()

    def holds(self, table: npt.NDArray[np.int32], whole: IntArray) -> bool:
        """Whether the requests share this still; should one in the place of another share more, that is left out."""
        count, columns = self._pages.shape
        if len(table) != count or table.shape[1] < columns or (whole < self._ends).any():
            return False
        if self.runs is None and (np.minimum(whole, self._longest) > self._ends).any():
            return False
        return bool(((table[:, :columns] == self._pages) | self._others).all())


class SharedPrefixes:
    """Finds what the requests of a step share, and counts. What it has found holds until a request comes or goes.

    Args:
        page_size: Tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._spared = 0
        self._last: dict[int, _Found] = {}

    def find(self, tables: Sequence[npt.NDArray[np.int32]], lengths: IntArray) -> Runs | None:
        """What requests, of each of which one token is computed, share in each page table; None if it does not pay.

        Args:
            tables: int32 [B, P], as :class:`AttentionBatch` has them; the first decides.
            lengths: int64 [B]: keys of each request, or 1 for one that reads by itself.
        """
        if int(lengths.sum()) <= LEAST_SPARED:
            return None
        first = self._find(0, tables[0], lengths)
        if first is None or first.spared < LEAST_SPARED:
            return None
        self._spared += first.spared
        return first, *(self._find(i, table, lengths) for i, table in enumerate(tables[1:], 1))

    def find_prompts(
        self, tables: Sequence[npt.NDArray[np.int32]], starts: IntArray, tokens: IntArray, tile: int
    ) -> Runs | None:
        """What requests share before the tokens that are computed of them; None if it does not pay.

        Args:
            tables: As for :meth:`find`.
            starts: int64 [B]: keys before the first of each request's tokens.
            tokens: int64 [B]: how many tokens are computed of each.
            tile: Tokens that read keys together: requests share for fewer tiles, not only for fewer readers.
        """
        if int(starts.sum()) <= LEAST_SPARED:
            return None
        first = find_runs(tables[0], starts + 1, self._page_size)
        if first is None:
            return None
        order = tokens[first.order]
        members = [order[begin : begin + count] for begin, count in zip(first.first, first.count, strict=True)]
        tiles = np.array([int((-(-each // tile)).sum()) + int(-each.sum() // tile) for each in members])
        if int((tiles * (first.end - first.begin)).sum()) < LEAST_SPARED:
            return None
        self._spared += first.spared
        return first, *(find_runs(table, starts + 1, self._page_size) for table in tables[1:])

    def order(self, table: npt.NDArray[np.int32], lengths: IntArray) -> PromptOrder | None:
        """An order of prompts of which some begin with the same keys; None if none do. O(pages).

        Args:
            table: int32 [B, P], as :class:`AttentionBatch` has it.
            lengths: int64 [B]: keys of each request.
        """
        whole = lengths // self._page_size
        begins = table[whole > 0, 0]
        if len(np.unique(begins)) == len(begins):
            return None
        pages = [row[:count] for row, count in zip(table, whole.tolist(), strict=True)]
        order = sorted(range(len(pages)), key=lambda i: pages[i].tolist())
        common = [0]
        for before, after in itertools.pairwise(order):
            alike = min(len(pages[before]), len(pages[after]))
            other = np.flatnonzero(pages[before][:alike] != pages[after][:alike])
            count = (int(other[0]) if len(other) else alike) * self._page_size
            common.append(count if count >= _LEAST_RUN else 0)
        self._spared += sum(common)
        return PromptOrder(order, common) if any(common) else None

    def take(self) -> int:
        """Keys that each layer did not read since the last call, as another request of the same step did."""
        spared, self._spared = self._spared, 0
        return spared

    def _find(self, group: int, table: npt.NDArray[np.int32], lengths: IntArray) -> SharedRuns | None:
        last, whole = self._last.get(group), (lengths - 1) // self._page_size
        if last is not None and last.holds(table, whole):
            return last.runs
        runs = find_runs(table, lengths, self._page_size)
        self._last[group] = _Found(table, self._page_size, whole, runs)
        return runs


def find_runs(table: npt.NDArray[np.int32], lengths: IntArray, page_size: int) -> SharedRuns | None:
    """What requests have in common from their first page on; None: nothing.

    A batch that shares nothing costs one sort of its first pages. Else it costs O(pages of the requests that share) for each
    level of branchings, vectorised over the requests.

    Args:
        table: int32 [B, P]: each request's pages in order; entries beyond its last are undefined.
        lengths: int64 [B]: each request's keys, of which the last is its own: it has just been written.
        page_size: Tokens in a page.
    """
    count = len(table)
    whole = (lengths - 1) // page_size
    begins = table[whole > 0, 0]
    if len(np.unique(begins)) == len(begins):
        return None
    runs: list[IntArray] = []
    # By place in ``order``: the group, whose members stand side by side and have their first ``at`` pages in common, of which
    # runs have the first ``done``.
    order = np.arange(count)
    group, at, done = np.zeros((3, count), np.int64)
    for _ in range(_LEVELS):
        column = np.minimum(at, table.shape[1] - 1)
        page = np.where(whole[order] > at, table[order, column].astype(np.int64), -1 - order)
        sort = np.lexsort((page, group))
        order, group, at, done, page = order[sort], group[sort], at[sort], done[sort], page[sort]
        first = np.flatnonzero(np.append(True, (np.diff(group) != 0) | (np.diff(page) != 0)))
        sizes = np.diff(first, append=count)
        group = np.repeat(np.arange(len(first)), sizes)
        wide = np.flatnonzero(sizes > 1)
        if not len(wide):
            break
        end = _common(table, order, first[wide], sizes[wide], whole)
        begin = done[first[wide]]
        long = (end - begin) * page_size >= _LEAST_RUN
        found = np.stack((first[wide], sizes[wide], begin * page_size, end * page_size), 1)
        runs.append(found[long])
        ends, covered = at[first], done[first]
        ends[wide], covered[wide] = end, np.where(long, end, begin)
        at, done = ends[group], covered[group]
    every = np.concatenate(runs) if runs else np.zeros((0, 4), np.int64)
    return SharedRuns(order, *every.T) if len(every) else None


def _common(
    table: npt.NDArray[np.int32], order: IntArray, first: IntArray, sizes: IntArray, whole: IntArray
) -> IntArray:
    """How many pages the members of each group have in common that are whole in all of them."""
    places = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    members, ones = order[places], np.repeat(order[first], sizes)
    begins = np.cumsum(sizes) - sizes
    limit = np.minimum.reduceat(whole[members], begins)
    columns = int(limit.max())
    other = table[members, :columns] != table[ones, :columns]
    same = np.where(other.any(1), other.argmax(1), columns)
    return np.minimum(np.minimum.reduceat(same, begins), limit)
