"""The second tier: which host page holds which tokens, which pages are being written from the device, and which are being read
from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np

from sapwood_worker.core.cache.eviction import EvictionQueue, least_recently_used
from sapwood_worker.core.cache.page_key import KvEventLog, PageKey, PageName
from sapwood_worker.core.cache.pages import CACHE, TRANSFER, PageAllocator
from sapwood_worker.records.kv_events import BlockRemoved
from sapwood_worker.records.step import LatePages, PageCopy, PageIds

# Which host page holds which tokens: the ledger and the index of the second tier. Integers only; the memory is
# ``host_pool.py``.
#
# Algorithm: a dictionary from page hash to entry, and the same page ledger as the device's. An entry is *written* first
# (its page is owned by a transfer), then *ready* (owned by the cache) and only then found. Eviction takes the least
# recently used entry that is not pinned and has no continuation here: the pages that remain of a sequence are a prefix of it.
#
# Complexity: O(1) for each page found, reserved or dropped, O(log entries) for each evicted. Bound: one entry for each
# host page.


@dataclass(slots=True, eq=False)
class HostPage:
    """An entry of the index.

    Attributes:
        name: What it holds.
        page: Its page id.
        ready: Whether its content is in place; until then it is being written.
        coming: Whether a step fills it, or has filled it, for other workers to read.
        computed: Whether that step is over: the device page has the content.
        device: The device page of which it is a copy, and that page's epoch; None: it is no copy.
        pins: How many users rely on its content; above 0 it is not evicted.
        doomed: Whether it is dropped as soon as it is not pinned; until then lookups do not find it.
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
        """Records added and removed pages in ``events``; called while there are no entries."""
        self._events = events

    def has(self, key: PageKey) -> bool:
        """Whether there is an entry of this hash, ready or not."""
        return key.hash in self._entries

    def epoch_of(self, page: int) -> int:
        """How often a page has been allocated. The number rises before the page is written for a new owner. May be called from
        any thread."""
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
        """Does what :meth:`match` does, and includes entries that are coming."""
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
        """Makes entries to be written; their pages are free ones, or come from eviction.

        Args:
            wanted: What they are to hold.

        Returns:
            One entry for each page that was not here yet, in order; only for the first ones if there is not room for all.
        """
        # Keyed by the hash: of two pages that collide, the first one is kept.
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
        """Makes reserved entries ready after their content is in place: from now on lookups find them."""
        self._allocator.move([entry.page for entry in entries], TRANSFER, CACHE)
        self.num_ready += len(entries)
        for entry in entries:
            assert not entry.ready
            entry.ready, entry.coming = True, False
            self._offer(entry)
        if self._events is not None:
            self._events.stored((entry.name for entry in entries), "CPU_TIER1")

    def abandon(self, entries: Sequence[HostPage]) -> None:
        """Frees reserved entries whose content did not arrive; no read writes to their pages any more."""
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
        """Drops every ready entry, at once or as soon as neither it nor its continuation is pinned. From now on lookups find none
        of them."""
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
        """Drops doomed evictable entries, and the entries before them that are also doomed and evictable."""
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
        """Takes an entry out of the index; returns the entry before it, if no other entry follows that one."""
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


def check_host(host: HostPages, writing: set[int], fetching: int, pins: Mapping[int, int], putting: int) -> None:
    """Compares the second tier's pages with those being written from the device, the number being fetched, the pins of each
    page, and the number of pins for writes to the third tier; for tests.

    Raises:
        AssertionError: They disagree.
    """
    host.check()
    unready = {entry.page for entry in host.entries() if not entry.ready}
    assert writing <= unready and len(unready) == len(writing) + fetching, "a host page waits for nobody"
    extra = [entry.pins - pins.get(entry.page, 0) for entry in host.entries()]
    assert min(extra, default=0) >= 0 and sum(extra) == putting, "pins are not balanced"


# Copies from the device to the second tier: from the choice of a page to the report that its copy has ended.
# Pages are copied in batches. A batch waits for the coming step, and is then under way until the runner reports its number.
# Until then its device pages are *being stored*: code that is about to overwrite one of them has to wait.


@dataclass(slots=True)
class Batch:
    """Pages that are copied together.

    Attributes:
        device: The pages on the device.
        windows: Each of these pages in every window, -1: not there.
        host: The second tier's entries that they are copied to.
        unwanted: Whether to drop the copies when they arrive.
    """

    device: list[int] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    host: list[HostPage] = field(default_factory=list)
    unwanted: bool = False


class HostStores:
    """The batches that have not ended.

    Attributes:
        waiting: The batch that goes with the coming step.
        epoch_of: How often a device page has been allocated.
    """

    def __init__(self) -> None:
        self.waiting = Batch()
        self.epoch_of: Callable[[int], int] = lambda page: 0
        self._under_way: dict[int, Batch] = {}
        self._storing: Counter[int] = Counter()
        self._begun = 0

    @property
    def busy(self) -> bool:
        """Whether any page is being stored."""
        return bool(self._storing)

    def is_storing(self, page: int) -> bool:
        """Whether a device page is being stored."""
        return page in self._storing

    def is_storing_any(self, pages: PageIds) -> bool:
        """Whether any of these device pages is being stored."""
        return self.busy and not self._storing.keys().isdisjoint(pages.tolist())

    def add(self, batch: Batch, entry: HostPage, page: int, windows: list[int]) -> None:
        """Adds a device page to a batch; ``windows`` is the same page in each window."""
        entry.device = page, self.epoch_of(page)
        batch.device.append(page)
        batch.windows.append(windows)
        batch.host.append(entry)
        self._storing[page] += 1

    def begin(self, batch: Batch) -> PageCopy | None:
        """Starts a batch; returns its copy, for the runner. None: the batch is empty."""
        if not batch.device:
            return None
        number, self._begun = self._begun, self._begun + 1
        self._under_way[number] = batch
        windows = np.array(batch.windows, np.int32).T
        host = np.array([entry.page for entry in batch.host], np.int32)
        return PageCopy(number, np.array(batch.device, np.int32), host, tuple(windows))

    def begin_waiting(self) -> PageCopy | None:
        """As :meth:`begin`, of all that waits."""
        batch, self.waiting = self.waiting, Batch()
        return self.begin(batch)

    def end(self, number: int) -> Batch:
        """Removes and returns the batch whose copy has ended, successfully or not."""
        batch = self._under_way.pop(number)
        self._storing -= Counter(batch.device)
        return batch

    def during(self, step: LatePages) -> Batch | None:
        """The batch of the pages that a step fills; None: there is no such batch, or it has ended."""
        return None if step.chosen is None else self._under_way.get(step.chosen.number)

    def forget(self) -> list[HostPage]:
        """Drops the waiting batch, and batches under way as soon as they have ended; returns the entries that waited."""
        for batch in self._under_way.values():
            batch.unwanted = True
        batch, self.waiting = self.waiting, Batch()
        self._storing -= Counter(batch.device)
        return batch.host

    def check(self) -> set[int]:
        """The host pages that are to be written; for tests.

        Raises:
            AssertionError: The pages being stored were miscounted.
        """
        batches = [*self._under_way.values(), self.waiting]
        assert Counter(page for batch in batches for page in batch.device) == self._storing
        return {entry.page for batch in batches for entry in batch.host}


# Pages that are read into host pages while the request that lacks them waits: from a store, or another
# worker.
# Host pages are reserved for a read, and given back only when the read has ended, successfully or not. A page that passed its
# check is an ordinary page of the second tier, pinned until the request starts. Bound: arrivals hold at most ``share``
# of the host pages.


@dataclass(slots=True, eq=False)
class Arrival:
    """The pages that one request waits for.

    Attributes:
        wanted: What the pages hold, in order; pages before index ``cursor`` are not being read any more.
        began: When the first page was asked for, by the clock.
        deadline: When the request stops waiting.
        looking: Whether it is still unknown which pages can be read.
        ended: When the last came.
        cancelled: Whether the request has started or ended.
        pinned: The pages that have come.
    """

    wanted: list[PageName]
    began: float
    deadline: float
    looking: bool = False
    ended: float = 0.0
    cancelled: bool = False
    cursor: int = 0
    pinned: list[HostPage] = field(default_factory=list)


A = TypeVar("A", bound=Arrival)


class ArrivalPages(Protocol):
    """The pages that reads fill, with the methods of :class:`~sapwood_worker.core.cache.host.HostPages`."""

    @property
    def num_pages(self) -> int:
        """How many there are."""
        ...

    def reserve(self, wanted: Sequence[PageName]) -> list[HostPage]:
        """Entries to be written."""
        ...

    def written(self, entries: Sequence[HostPage]) -> None:
        """Makes reserved entries ready."""
        ...

    def abandon(self, entries: Sequence[HostPage]) -> None:
        """Frees reserved entries whose content did not come."""
        ...

    def pin(self, entries: Sequence[HostPage]) -> None:
        """Keeps entries that are ready; pins count."""
        ...

    def unpin(self, entries: Sequence[HostPage]) -> None:
        """Takes one pin back from each."""
        ...


class Arrivals(Generic[A]):
    """The ledger of such pages. Single-threaded.

    Args:
        host: The pages.
        share: The most of them that arrivals hold at once.
        clock: Seconds, monotonic.

    Attributes:
        held: The waiting requests.
    """

    def __init__(self, host: ArrivalPages, share: float, clock: Callable[[], float]) -> None:
        self.held: set[int] = set()
        self._host = host
        self._limit = int(share * host.num_pages)
        self._clock = clock
        self._arrivals: dict[int, A] = {}
        self._reading: set[bytes] = set()
        self._occupied = 0

    def __getitem__(self, serial: int) -> A:
        return self._arrivals[serial]

    @property
    def reading(self) -> int:
        """Host pages that are reserved for reads that have not ended."""
        return len(self._reading)

    @property
    def limit(self) -> int:
        """Host pages that arrivals may hold at once."""
        return self._limit

    @property
    def room(self) -> int:
        """Host pages that arrivals may still take."""
        return max(0, self._limit - self._occupied)

    def add(self, serial: int, arrival: A) -> None:
        """Begins an arrival; :meth:`settle` ends it. If the request is also in ``held``, it waits."""
        self._arrivals[serial] = arrival

    def reserve(self, wanted: Sequence[PageName]) -> list[HostPage]:
        """Reserves host pages for those of ``wanted`` that are neither present nor being read for another request."""
        entries = self._host.reserve(wanted[: self.room])
        self._occupied += len(entries)
        self._reading.update(entry.key.hash for entry in entries)
        return entries

    def came(self, arrival: A, batch: list[HostPage], good: list[bool]) -> int:
        """Notes the end of a read into reserved pages; returns how many of them passed their check, according to ``good``."""
        arrived = [entry for entry, fine in zip(batch, good, strict=True) if fine]
        self._reading.difference_update(entry.key.hash for entry in batch)
        self._host.written(arrived)
        self._host.abandon([entry for entry, fine in zip(batch, good, strict=True) if not fine])
        self._host.pin(arrived)
        if arrival.cancelled:
            self._occupied -= len(batch)
            self._host.unpin(arrived)
        else:
            self._occupied -= len(batch) - len(arrived)
            arrival.pinned += arrived
            arrival.ended = self._clock()
        return len(arrived)

    def settle(self, serial: int) -> tuple[int, float, float] | None:
        """Releases the pages kept for a request that has started or ended.

        Returns:
            How many pages arrived, and when the first was asked for and the last arrived, by the clock; None: no pages.
        """
        arrival = self._arrivals.pop(serial, None)
        self.held.discard(serial)
        if arrival is None:
            return None
        arrival.cancelled = True
        count = self.let_go(arrival)
        return (count, arrival.began, arrival.ended) if count else None

    def let_go(self, arrival: A) -> int:
        """Unpins the pages that have arrived so far, so that they may be evicted; returns how many pages these were."""
        count = len(arrival.pinned)
        self._host.unpin(arrival.pinned)
        self._occupied -= count
        arrival.pinned = []
        return count

    def move(self, serial: int, to: int) -> A:
        """Gives the arrival of one request to another; returns it."""
        arrival = self._arrivals[to] = self._arrivals.pop(serial)
        return arrival

    def release(self, is_over: Callable[[A], bool]) -> list[int]:
        """Returns the requests that no longer need to wait, and stops holding them."""
        released = [serial for serial in self.held if is_over(self._arrivals[serial])]
        self.held.difference_update(released)
        return released

    def is_reading(self, arrival: A) -> bool:
        """Whether any page of the arrival is still being read, for this or another request."""
        while arrival.cursor < len(arrival.wanted) and not arrival.looking:
            if arrival.wanted[arrival.cursor].key.hash in self._reading:
                return True
            arrival.cursor += 1
        return arrival.looking

    def pins(self) -> dict[int, int]:
        """Compares the counts with what is held; returns how often each host page is pinned. For tests.

        Raises:
            AssertionError: They disagree.
        """
        pins = count_pins(arrival.pinned for arrival in self._arrivals.values())
        assert self._occupied == sum(pins.values()) + len(self._reading), "pages that arrive were miscounted"
        assert self._occupied <= self._limit, "arrivals hold more than their share"
        assert self.held <= self._arrivals.keys()
        return pins


def count_pins(pinned: Iterable[list[HostPage]]) -> dict[int, int]:
    """How often each host page is pinned."""
    count: dict[int, int] = {}
    for entries in pinned:
        for entry in entries:
            count[entry.page] = count.get(entry.page, 0) + 1
    return count
