"""What a worker knows the store to hold, so that its KV events can tell of it (medium CPU_TIER2).

The store is shared and others remove from it: a page is known if the worker has written, read or found it and not missed it
since. It is known only while the page before it is, so that what is known of a prompt is a prefix.

Algorithm: a tree by parent hashes. Beyond the bound the least recently seen leaf goes; a page that turns out to be missing goes
with all that follow it. Complexity: O(1) a page to add or touch, O(log pages) to drop. Bound: ``most`` pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sapwood_worker.core.cache.eviction import EvictionQueue, least_recently_used
from sapwood_worker.core.cache.kv_event_log import KvEventLog
from sapwood_worker.core.cache.page_key import PageName
from sapwood_worker.records.kv_events import BlockRemoved, BlockStored


@dataclass(slots=True, eq=False)
class _Known:
    """A page; the last four fields are those of ``eviction.Candidate``."""

    hash: bytes
    parent: bytes
    children: set[bytes] = field(default_factory=set)
    created: int = 0
    used: int = 0
    hits: int = 0
    queued: bool = False


class KnownObjects:
    """Which pages the store is known to hold. Single-threaded.

    Args:
        most: Pages it remembers.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pages: dict[bytes, _Known] = {}
        self._events: KvEventLog | None = None
        self._queue: EvictionQueue[_Known] = EvictionQueue(least_recently_used, self._is_leaf)
        self._tick = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: bytes) -> bool:
        return name in self._pages

    def announce(self, events: KvEventLog) -> None:
        """Has ``events`` record what becomes known and unknown; until then nothing is remembered."""
        self._events = events

    def add(self, names: Sequence[PageName]) -> None:
        """Notes that the store has these pages; those that follow an unknown one are passed over."""
        if self._events is None:  # nobody asks
            return
        self._tick += 1
        for name in names:
            key = name.key.hash
            page = self._pages.get(key)
            if page is None:
                above = self._pages.get(name.parent)
                if name.parent and above is None:
                    continue
                page = self._pages[key] = _Known(key, name.parent, created=self._tick)
                if above is not None:
                    above.children.add(key)
                self._events.add(BlockStored(key, name.parent, name.token_ids, "CPU_TIER2", name.lora))
            page.used = self._tick
            self._offer(page)
        removed: list[bytes] = []
        while len(self._pages) > self._most and (leaf := self._queue.pop()) is not None:
            self._drop(leaf)
            removed.append(leaf.hash)
        self._tell(removed)

    def forget(self, name: PageName) -> None:
        """Forgets a page that the store lacks, and all that follow it."""
        page = self._pages.get(name.key.hash)
        if page is None:
            return
        order = [page]
        for each in order:  # grows meanwhile: parents before children
            order += [self._pages[child] for child in each.children]
        for each in reversed(order):
            self._drop(each)
        self._tell([each.hash for each in reversed(order)])

    def clear(self) -> None:
        """Forgets everything."""
        self._tell([*reversed(self._pages)])  # a dict keeps its order, and a page is added after its parent
        self._pages.clear()

    def check(self) -> None:
        """Compares the tree with itself; for tests.

        Raises:
            AssertionError: It is not a tree, or holds too many pages.
        """
        assert len(self._pages) <= self._most
        for page in self._pages.values():
            assert not page.parent or page.hash in self._pages[page.parent].children
            assert page.queued or not self._is_leaf(page), "a leaf that eviction cannot find"

    def _drop(self, page: _Known) -> None:
        del self._pages[page.hash]
        above = self._pages.get(page.parent)
        if above is not None:
            above.children.discard(page.hash)
            self._offer(above)

    def _offer(self, page: _Known) -> None:
        if self._is_leaf(page):
            self._queue.offer(page)

    def _is_leaf(self, page: _Known) -> bool:
        return not page.children and self._pages.get(page.hash) is page

    def _tell(self, removed: list[bytes]) -> None:
        if removed and self._events is not None:
            self._events.add(BlockRemoved(b"".join(removed), "CPU_TIER2"))
