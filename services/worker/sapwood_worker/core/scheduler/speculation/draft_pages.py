"""Which pages hold a draft model's keys and values too.

A draft model has a pool of its own with as many pages as the model's, under the same page ids. So a request's row of the page
table serves both, and both share prefixes. But the draft model computes only requests for which it drafts. So each page's epoch
is noted when the draft model fills it: a page that is given out anew has another epoch, and counts as empty.
"""

from __future__ import annotations

import numpy as np

from sapwood_worker.core.cache.page_allocator import PageAllocator
from sapwood_worker.core.cache.page_table import PageTable
from sapwood_worker.records.step import IntArray


class DraftPages:
    """The filled pages.

    Args:
        table: The page table.
        ledger: Whose pages stand in it.
        page_size: Tokens in a page.
    """

    def __init__(self, table: PageTable, ledger: PageAllocator, page_size: int) -> None:
        self.page_size = page_size
        self.table = table
        self._ledger = ledger
        self._filled = np.zeros(ledger.num_pages, np.int64)  # epochs begin at 1

    def leading(self, slot: int, tokens: int) -> int:
        """How many of a row's first tokens, in whole pages, the draft model has computed. Vectorised, O(pages)."""
        pages = self.table.pages(slot)[: tokens // self.page_size]
        missing = self._filled[pages] != self._ledger.handle(pages).epochs
        return int(missing.argmax() if missing.any() else len(pages)) * self.page_size

    def fill(self, slot: int, start: int, end: int) -> None:
        """Notes that the draft model has computed the tokens of a row up to ``end``, all from ``start`` on just now."""
        first, last = start // self.page_size, end // self.page_size
        if first == last:  # as for most drafts
            return
        pages = self.table.pages(slot)[first:last]
        self._filled[pages] = self._ledger.handle(pages).epochs

    def mark(self, slot: int, position: int) -> tuple[int, int]:
        """The page of a position, and its epoch: equal later only if it is still the same. -1 beyond the row's end."""
        if position // self.page_size >= self.table.length(slot):
            return -1, -1
        page = int(self.table.rows[slot, position // self.page_size])
        return page, self._ledger.epoch_of(page)

    def reach(self, slot: int) -> int:
        """Tokens that a row's pages hold."""
        return self.table.length(slot) * self.page_size

    def rows(self, slots: IntArray, end: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """The pages of some rows, int32 [R, W], up to that of the token before ``end``; beyond a row's last undefined."""
        return self.table.rows[slots, : -(-end // self.page_size)]
