"""Which requests of a step share which pages: found in their page tables, which name a page of the prefix cache in every row
that uses it. So the ranks of a group find the same, and a step carries nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sapwood_kernels.attention.planned import IntArray, SharedRuns

Runs = tuple[SharedRuns | None, ...]
"""What requests share in each page table."""

LEAST_SPARED = 8192
"""Keys that have to be spared for sharing to pay: their reading takes as long as the kernel more in each layer."""
_LEAST_RUN = 128
"""Keys of the shortest run that is read for itself."""
_LEVELS = 8
"""The most branchings on a request's way; below, requests read by themselves."""
_COLUMNS = 64
"""Pages that are compared at once, at first."""


class SharedPrefixes:
    """Finds what the requests of a step share, and counts.

    Args:
        page_size: Tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._spared = 0

    def find(self, tables: Sequence[npt.NDArray[np.int32]], lengths: IntArray) -> Runs | None:
        """What requests, of each of which one token is computed, share in each page table; None if it does not pay.

        Args:
            tables: int32 [B, P], as :class:`AttentionBatch` has them; the first decides.
            lengths: int64 [B]: keys of each request.
        """
        first = find_runs(tables[0], lengths, self._page_size)
        if first is None or first.spared < LEAST_SPARED:
            return None
        self._spared += first.spared
        return first, *(find_runs(table, lengths, self._page_size) for table in tables[1:])

    def take(self) -> int:
        """Keys that each layer did not read since the last call, as another request of the same step did."""
        spared, self._spared = self._spared, 0
        return spared


def find_runs(table: npt.NDArray[np.int32], lengths: IntArray, page_size: int) -> SharedRuns | None:
    """What requests have in common from their first page on; None: nothing.

    A batch that shares nothing costs one sort of its first pages; else it is O(pages that are shared, by all who share them).

    Args:
        table: int32 [B, P]: each request's pages in order; entries beyond its last are undefined.
        lengths: int64 [B]: each request's keys, of which the last is its own: it has just been written.
        page_size: Tokens in a page.
    """
    whole = (lengths - 1) // page_size
    if len(np.unique(table[:, 0])) == len(table):
        return None
    order = np.arange(len(table))
    runs: list[tuple[int, int, int, int]] = []
    # Stretches of ``order`` whose requests have their first ``at`` pages in common, of which runs have the first ``done``.
    stack = [(0, len(table), 0, 0, _LEVELS)]
    while stack:
        low, high, at, done, levels = stack.pop()
        for first, last in _alike(order, low, high, at, table, whole):
            members = order[first:last]
            end = _common(table, members, at, int(whole[members].min()))
            begin = done
            if (end - done) * page_size >= _LEAST_RUN:
                runs.append((first, last - first, done * page_size, end * page_size))
                begin = end
            if levels > 1 and last - first > 2:
                stack.append((first, last, end, begin, levels - 1))
    if not runs:
        return None
    return SharedRuns(order, *np.array(runs, np.int64).T)


def _alike(
    order: IntArray, low: int, high: int, at: int, table: npt.NDArray[np.int32], whole: IntArray
) -> list[tuple[int, int]]:
    """Sorts ``order[low:high]`` by what page ``at`` is; returns the stretches of at least two that have the same one."""
    members = order[low:high]
    if at >= table.shape[1]:
        return []
    pages = np.where(whole[members] > at, table[members, at].astype(np.int64), -1 - members)
    by_page = np.argsort(pages, kind="stable")
    order[low:high], pages = members[by_page], pages[by_page]
    edges = np.flatnonzero(np.diff(pages, prepend=np.iinfo(np.int64).min, append=np.iinfo(np.int64).max))
    wide = np.flatnonzero(np.diff(edges) > 1)
    return [(low + int(edges[i]), low + int(edges[i + 1])) for i in wide]


def _common(table: npt.NDArray[np.int32], members: IntArray, at: int, limit: int) -> int:
    """How many pages the members have in common, at most ``limit``; page ``at`` is the same."""
    columns = _COLUMNS
    while at < limit:
        end = min(at + columns, limit)
        part = table[members, at:end]
        same = (part == part[0]).all(0)
        if not same.all():
            return at + int(same.argmin())
        at, columns = end, 2 * columns
    return at
