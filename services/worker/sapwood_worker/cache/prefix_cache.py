"""The prefix cache: radix tree, ledger and page table together, so that a page changes hands in all of them at once.

A row of the page table begins with pages that are the tree's, locked for the row, and goes on with pages of its own.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sapwood_worker.cache.eviction import EvictionName
from sapwood_worker.cache.kv_events import KvEventLog
from sapwood_worker.cache.page_allocator import CACHE, TRANSFER, PageAllocator, PageIds
from sapwood_worker.cache.page_table import PageTable
from sapwood_worker.cache.radix_tree import Node, RadixTree


class LowerTiers(Protocol):
    """What the prefix cache tells the tiers below it, and asks of them. All but ``evicted`` concern one row."""

    def open(self, slot: int, token_ids: array[int], namespace: bytes, pages: PageIds) -> None:
        """A row begins with these cached pages; what the tiers have of ``token_ids`` beyond them is to be kept for it."""
        ...

    def load(self, slot: int, pages: PageIds) -> int:
        """Has the row's next pages filled before the coming step computes, as many as :meth:`open` kept; returns how many."""
        ...

    def loaded(self, slot: int) -> None:
        """The step that filled them is done."""
        ...

    def cached(self, slot: int, token_ids: array[int], start: int, pages: PageIds, new: PageIds) -> None:
        """The row's pages from entry ``start`` on are cached now, as ``pages``; ``new`` of these were not before."""
        ...

    def close(self, slot: int) -> None:
        """The row ends."""
        ...

    def evicted(self, pages: PageIds) -> None:
        """These pages, with what is still in them, are about to be given to somebody else."""
        ...


@dataclass(slots=True)
class _Row:
    """Of an open row: the locked end of its shared prefix, how many pages that prefix has, and which pages after it are being
    filled from the tiers below."""

    node: Node
    shared: int
    loading: PageIds = field(default_factory=lambda: np.empty(0, np.int32))


class PrefixCache:
    """Pages of prompts and answers kept for requests to come.

    Attributes:
        enabled: If not, nothing is kept and nothing found.

    Args:
        allocator: The ledger.
        page_table: Rows of the running requests.
        page_size: Tokens a page.
        enabled: See above.
        eviction: What goes first when room is needed.
        below: The tiers below; None: there are none.
        events: Takes note of what comes and goes; None: nobody asks.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_table: PageTable,
        page_size: int,
        *,
        enabled: bool = True,
        eviction: EvictionName = "lru",
        below: LowerTiers | None = None,
        events: KvEventLog | None = None,
    ) -> None:
        self._allocator = allocator
        self._table = page_table
        self._tree = RadixTree(page_size, eviction, events)
        self._page_size = page_size
        self.enabled = enabled
        self._below = below if enabled else None
        self._rows: dict[int, _Row] = {}

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        return self._tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` could give now: free ones and evictable ones."""
        return self._allocator.num_free + self._tree.num_evictable

    def probe(self, token_ids: array[int], namespace: bytes) -> tuple[int, int]:
        """What :meth:`open` would find: pages, and how many of these count as available now. Changes nothing."""
        return self._tree.probe(self._key(token_ids, 0, self._usable(token_ids)), namespace)

    def open(self, slot: int, name: str, token_ids: array[int], namespace: bytes) -> int:
        """Begins an empty row with the longest cached prefix, locked, leaving at least one token to compute.

        Args:
            slot: The row.
            name: What to call its owner in errors.
            token_ids: All that is known of the sequence.
            namespace: Within which to look.

        Returns:
            The number of tokens found.
        """
        match = self._tree.match(self._key(token_ids, 0, self._usable(token_ids)), namespace)
        self._tree.lock(match.node)
        self._allocator.name(slot, f"request {name}")
        self._table.append(slot, match.pages)
        self._rows[slot] = _Row(match.node, len(match.pages))
        if self._below is not None:
            self._below.open(slot, token_ids[: self._usable(token_ids)], namespace, match.pages)
        return len(match.pages) * self._page_size

    def allocate(self, slot: int, count: int) -> bool:
        """Adds ``count`` pages to a row, evicting if need be; False, and nothing done, if there are not as many."""
        missing = count - self._allocator.num_free
        if missing > self._tree.num_evictable:
            return False
        if missing > 0:
            self._evict(missing)
        self._table.append(slot, self._allocator.allocate(count, slot))
        return True

    def load(self, slot: int) -> int:
        """Has the first pages of a row's own filled from the tiers below, before the coming step computes.

        Called once, after :meth:`open` and :meth:`allocate`. Until the next commit, which follows the step, the transfer
        owns the pages.

        Returns:
            The number of tokens that come so.
        """
        if self._below is None:
            return 0
        row = self._rows[slot]
        own = self._table.pages(slot, row.shared)
        row.loading = own[: self._below.load(slot, own)].copy()
        self._allocator.move(row.loading, slot, TRANSFER)
        return len(row.loading) * self._page_size

    def commit(self, slot: int, token_ids: array[int], computed: int) -> None:
        """Shares the full pages of a row's first ``computed`` tokens, whose KV must be in place.

        Where the tree has a page already, the row takes the tree's and frees its own.
        """
        row = self._rows[slot]
        self._arrived(slot, row)
        start, end = row.shared, computed // self._page_size
        if not self.enabled or end <= start:
            return
        own = self._table.pages(slot, start)[: end - start].copy()
        cached = self._tree.insert(row.node, self._key(token_ids, start * self._page_size, computed), own)
        taken = cached.pages == own
        self._allocator.move(own[taken], slot, CACHE)
        if not taken.all():
            self._table.replace(slot, start, cached.pages)
            self._allocator.free(own[~taken], slot)
        if self._below is not None:
            self._below.cached(slot, token_ids, start, cached.pages, own[taken])
        self._tree.lock(cached.node)
        self._tree.unlock(row.node)
        row.node, row.shared = cached.node, end

    def close(self, slot: int) -> None:
        """Ends a row: unlocks its prefix and frees the pages that are its own."""
        row = self._rows.pop(slot)
        self._arrived(slot, row)
        if self._below is not None:
            self._below.close(slot)
        self._tree.unlock(row.node)
        self._allocator.free(self._table.pages(slot, row.shared), slot)

    def flush(self) -> int:
        """Forgets everything that no running request holds; returns the number of pages freed."""
        return self._evict(self._tree.num_evictable)

    def check_idle(self) -> None:
        """Checks that nothing is held while no row is open; vectorised, O(pages).

        Raises:
            AssertionError: A page leaked or a lock was left behind.
        """
        self._allocator.check()
        assert not self._rows, f"rows {sorted(self._rows)} are open, though nothing runs"
        assert self._tree.num_evictable == self._tree.num_pages, "a lock was left behind in the prefix cache"
        assert self._allocator.num_used == self._tree.num_pages, "pages leaked: nothing runs, yet some are held"

    def check(self) -> None:
        """Compares tree, ledger and rows page by page; for tests.

        Raises:
            AssertionError: They disagree.
        """
        self._tree.check()
        self._allocator.check()
        nodes = list(self._tree.nodes())
        held = sorted(int(page) for node in nodes for page in node.pages)
        assert held == self._allocator.owned_by(CACHE).tolist(), "the tree's pages are not the ledger's"
        locks: dict[Node, int] = {}
        loads: list[int] = []
        for slot, row in self._rows.items():
            prefix: list[int] = []
            at: Node | None = row.node
            while at is not None:
                locks[at] = locks.get(at, 0) + 1
                prefix = [*at.pages.tolist(), *prefix]
                at = at.parent
            pages = self._table.pages(slot).tolist()
            assert pages[: row.shared] == prefix, f"row {slot} does not begin with the prefix it locks"
            own = self._allocator.owned_by(slot).tolist()
            loading = row.loading.tolist()
            loads += loading
            assert pages[row.shared : row.shared + len(loading)] == loading, (
                f"row {slot} is not filled where it should be"
            )
            assert sorted(pages[row.shared + len(loading) :]) == own, f"row {slot} does not hold the pages it owns"
        assert sorted(loads) == self._allocator.owned_by(TRANSFER).tolist(), "a page is filled for no row"
        for node in nodes:
            assert node.locks == locks.get(node, 0), "locks are not balanced"

    def _arrived(self, slot: int, row: _Row) -> None:
        if len(row.loading) and self._below is not None:
            self._allocator.move(row.loading, TRANSFER, slot)
            row.loading = row.loading[:0]
            self._below.loaded(slot)

    def _evict(self, count: int) -> int:
        pages = self._tree.evict(count)
        if self._below is not None:
            self._below.evicted(pages)
        self._allocator.free(pages, CACHE)
        return len(pages)

    def _usable(self, token_ids: array[int]) -> int:
        """Tokens that may come from the cache: the last one is computed again, for its logits."""
        return len(token_ids) - 1 if self.enabled else 0

    def _key(self, token_ids: array[int], start: int, end: int) -> bytes:
        """The whole pages of ``token_ids[start:end]``; ``start`` is a multiple of the page."""
        return token_ids[start : end // self._page_size * self._page_size].tobytes()
