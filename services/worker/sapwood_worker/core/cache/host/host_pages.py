"""Which host page holds what: the ledger and the index of the second tier. Integers only; the memory is ``host_pool.py``.

Algorithm: a dictionary from page hash to entry, and the same page ledger as the device's. An entry is *written* first (its page
is owned by a transfer), then *ready* (owned by the cache) and only then found. Eviction takes the least recently used entry that
is not pinned and has no continuation here: what is left of a sequence is a prefix of it.

Complexity: O(1) for each page found, reserved or dropped, O(log entries) for each evicted. Bound: one entry for each host page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from sapwood_worker.core.cache.eviction import EvictionQueue, least_recently_used
from sapwood_worker.core.cache.kv_event_log import KvEventLog
from sapwood_worker.core.cache.page_allocator import CACHE, TRANSFER, PageAllocator
from sapwood_worker.core.cache.page_key import PageKey, PageName
from sapwood_worker.records.kv_events import BlockRemoved


@dataclass(slots=True, eq=False)
class HostPage:
    """An entry of the index.

    Attributes:
        name: What it holds.
        page: Its page id.
        ready: Whether its content is in place; until then it is being written.
        coming: Whether it is filled for others to read with what a step computes, or has computed.
        computed: Whether that has been computed: the device's page has the content.
        device: The device's page that it is a copy of, and that page's epoch; None: none.
        pins: How many users rely on its content; above 0 it is not evicted.
        doomed: Whether it is dropped as soon as it is not pinned, and not found meanwhile.
        created: When it was added, by the index's tick.
        used: When it was last found or added, by the index's tick.
        hits: How often it was found.
        queued: Whether the eviction queue has an entry for it; the queue's own mark.
    """

    name: PageName
    page: int
    ready: bool = False
    coming: bool = False
    computed: bool = False
    device: tuple[int, int] | None = None
    pins: int = 0
    doomed: bool = False
    created: int = 0
    used: int = 0
    hits: int = 0
    queued: bool = False

    @property
    def key(self) -> PageKey:
        """The key of what it holds."""
        return self.name.key


class HostPages:
    """The second tier's pages.

    Args:
        num_pages: Pages in the host pool.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._events: KvEventLog | None = None
        self._allocator = PageAllocator(num_pages)
        self._entries: dict[bytes, HostPage] = {}
        self._children: dict[bytes, int] = {}
        self._queue: EvictionQueue[HostPage] = EvictionQueue(least_recently_used, self._is_evictable)
        self._tick = 0
        self.num_ready = 0
        """Pages whose content can be used."""

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._allocator.num_free

    def announce(self, events: KvEventLog) -> None:
        """Has ``events`` record what enters and leaves; called while there are no entries."""
        self._events = events

    def has(self, key: PageKey) -> bool:
        """Whether there is an entry of this hash, ready or not."""
        return key.hash in self._entries

    def epoch_of(self, page: int) -> int:
        """How often a page has been allocated: it goes up before anything is written there for another. May be called from any
        thread."""
        return self._allocator.epoch_of(page)

    def find(self, key: PageKey) -> HostPage | None:
        """The ready entry of exactly this key; None if there is none."""
        entry = self._entries.get(key.hash)
        found = entry is not None and entry.ready and not entry.doomed and entry.key.proof == key.proof
        return entry if found else None

    def match(self, keys: Iterable[PageKey]) -> list[HostPage]:
        """The ready entries of the longest prefix of ``keys``; changes nothing."""
        found: list[HostPage] = []
        for key in keys:
            entry = self.find(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def expected(self, keys: Iterable[PageKey]) -> list[HostPage]:
        """As :meth:`match`, with the entries that are coming."""
        found: list[HostPage] = []
        for key in keys:
            entry = self._entries.get(key.hash)
            if entry is None or not (entry.ready or entry.coming) or entry.doomed or entry.key.proof != key.proof:
                break
            found.append(entry)
        return found

    def touch(self, entries: Sequence[HostPage]) -> None:
        """Marks entries as used now."""
        self._tick += 1
        for entry in entries:
            entry.used = self._tick
            entry.hits += 1

    def reserve(self, wanted: Sequence[PageName]) -> list[HostPage]:
        """Entries to be written, their pages taken from the free ones or by eviction.

        Args:
            wanted: What they are to hold.

        Returns:
            One entry for each page that was not here yet, in order, or for as many of the first as there is room.
        """
        # Keyed by the hash: the first of two pages that collide is taken.
        new = {name.key.hash: name for name in reversed(wanted) if name.key.hash not in self._entries}
        self._evict(len(new) - self._allocator.num_free)
        count = min(len(new), self._allocator.num_free)
        pages = self._allocator.allocate(count, TRANSFER).tolist()
        self._tick += 1
        reserved: list[HostPage] = []
        for name, page in zip(islice(reversed(new.values()), count), pages, strict=True):
            entry = HostPage(name, page, created=self._tick, used=self._tick)
            reserved.append(entry)
            self._entries[name.key.hash] = entry
            self._children[name.parent] = self._children.get(name.parent, 0) + 1
        return reserved

    def written(self, entries: Sequence[HostPage]) -> None:
        """Makes reserved entries ready, whose content is in place: from now on they are found."""
        self._allocator.move([entry.page for entry in entries], TRANSFER, CACHE)
        self.num_ready += len(entries)
        for entry in entries:
            assert not entry.ready
            entry.ready, entry.coming = True, False
            self._offer(entry)
        if self._events is not None:
            self._events.stored((entry.name for entry in entries), "CPU_TIER1")

    def abandon(self, entries: Sequence[HostPage]) -> None:
        """Frees reserved entries whose content did not come; nobody writes to their pages any more."""
        self._allocator.free([entry.page for entry in entries], TRANSFER)
        for entry in entries:
            assert not entry.ready
            parent = self._unlink(entry)
            if parent is not None:
                self._offer(parent)

    def pin(self, entries: Sequence[HostPage]) -> None:
        """Keeps entries that are ready, or coming, from being evicted; pins count."""
        for entry in entries:
            assert entry.ready or entry.coming
            entry.pins += 1

    def unpin(self, entries: Sequence[HostPage]) -> None:
        """Takes one pin back from each."""
        for entry in entries:
            assert entry.pins > 0, "unpinned more often than pinned"
            entry.pins -= 1
            self._offer(entry)

    def clear(self) -> None:
        """Drops every ready entry, at once or as soon as neither it nor its continuation is pinned; none is found any more."""
        ready = [entry for entry in self._entries.values() if entry.ready]
        for entry in ready:
            entry.doomed = True
        self._release(ready)

    def entries(self) -> Iterator[HostPage]:
        """All entries."""
        return iter(self._entries.values())

    def check(self) -> None:
        """Compares index and ledger, page by page; for tests.

        Raises:
            AssertionError: They disagree.
        """
        self._allocator.check()
        entries = list(self._entries.values())
        ready = sorted(entry.page for entry in entries if entry.ready)
        writing = sorted(entry.page for entry in entries if not entry.ready)
        assert ready == self._allocator.owned_by(CACHE).tolist(), "the index's pages are not the ledger's"
        assert writing == self._allocator.owned_by(TRANSFER).tolist(), "a host page is written by nobody"
        assert self.num_ready == len(ready)
        children: dict[bytes, int] = {}
        for entry in entries:
            children[entry.name.parent] = children.get(entry.name.parent, 0) + 1
            assert entry.queued or not self._is_evictable(entry), "an entry that eviction cannot find"
            assert not (entry.doomed and self._is_evictable(entry)), "a doomed entry that nobody relies on"
        assert children == self._children, "children were miscounted"

    def _evict(self, count: int) -> None:
        gone: list[HostPage] = []
        doomed: list[HostPage] = []
        while len(gone) < count and (entry := self._queue.pop()) is not None:
            gone.append(entry)
            parent = self._unlink(entry)
            if parent is not None and parent.doomed:
                doomed.append(parent)
            elif parent is not None:
                self._offer(parent)
        self._dropped(gone)
        self._release(doomed)

    def _release(self, entries: Iterable[HostPage]) -> None:
        """Drops those entries that are doomed and evictable, and the entries before them that are so too."""
        gone: list[HostPage] = []
        for entry in entries:
            at: HostPage | None = entry
            while at is not None and at.doomed and self._is_evictable(at):
                gone.append(at)
                at = self._unlink(at)
            if at is not None and not at.doomed:
                self._offer(at)
        self._dropped(gone)

    def _dropped(self, entries: Sequence[HostPage]) -> None:
        if self._events is not None and entries:
            self._events.add(BlockRemoved(b"".join(entry.key.hash for entry in entries), "CPU_TIER1"))
        self._allocator.free([entry.page for entry in entries], CACHE)
        self.num_ready -= len(entries)

    def _unlink(self, entry: HostPage) -> HostPage | None:
        """Takes an entry out of the index; returns the one before it, if that has no other after it."""
        del self._entries[entry.key.hash]
        above = entry.name.parent
        left = self._children[above] - 1
        if left:
            self._children[above] = left
            return None
        del self._children[above]
        return self._entries.get(above)

    def _offer(self, entry: HostPage) -> None:
        if not self._is_evictable(entry):
            return
        if entry.doomed:
            self._release((entry,))
        else:
            self._queue.offer(entry)

    def _is_evictable(self, entry: HostPage) -> bool:
        return (
            entry.ready
            and not entry.pins
            and entry.key.hash not in self._children
            and self._entries.get(entry.key.hash) is entry
        )
