"""The third tier as the scheduler sees it, and the pages that a worker knows to be in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from sapwood_worker.core.cache.eviction import EvictionQueue, least_recently_used
from sapwood_worker.core.cache.host import Arrival, Arrivals, HostPage, HostPages
from sapwood_worker.core.cache.page_key import KvEventLog, PageName
from sapwood_worker.core.cache.storage.backend import StorageError
from sapwood_worker.core.cache.storage.connection import Connection
from sapwood_worker.core.cache.storage.record import object_name, seal, take_good
from sapwood_worker.model.pools.host_pool import BATCH_PAGES, HostPool
from sapwood_worker.records.kv_events import BlockRemoved, BlockStored

# The third tier as the scheduler sees it: pages go to a store from the second tier and come back while a request
# queues.
# For an accepted request, pages that the first two tiers lack are *prefetched*:
# the store is asked how many of the
# request's next pages it has, host pages are reserved for them (``host.py``), and they are read in batches. Whether the
# request waits for them: ``best_effort`` no; ``timeout`` until a time that grows with the prompt; ``wait_complete``
# until all pages are there (a minute at most).
#
# Nothing here blocks: calls to the store run in other threads (``backend.py``). Every page from a store is checked byte by
# byte (``record.py``), and a request is released in time even if the store hangs.
#
# Bound: prefetches hold at most ``share`` of the host pages; writes to the store pin at most the same number again.


# The pages that a worker knows to be in the store, for its KV events (medium CPU_TIER2).
# Other workers share the store and remove pages from it: a page is known if the worker has written, read or found it and not
# missed it since. A page is known only while the page before it is known, so the known pages of a prompt are a prefix.
#
# Algorithm: a tree by parent hashes. Above the bound the least recently seen leaf is forgotten; a page that turns out to be
# missing is forgotten with all pages that follow it. Complexity: O(1) a page to add or touch, O(log pages) to drop. Bound:
# ``most`` pages.


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
        """Records pages that become known and unknown in ``events``; before this call nothing is remembered."""
        self._events = events

    def add(self, names: Sequence[PageName]) -> None:
        """Notes that the store has these pages; pages after an unknown one are ignored."""
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


PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]

_KNOWN_FOR_EACH_HOST_PAGE = 4
_LONGEST_WAIT = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOptions:
    """How requests wait for pages in the store.

    Attributes:
        policy: Whether a request waits; the module's docstring explains the policies.
        timeout: With the policy ``timeout``, the seconds to wait for any prompt.
        timeout_per_1k: With the policy ``timeout``, the additional seconds for each 1000 tokens that are looked for.
        share: The most of the host pages that prefetches hold at once.
    """

    policy: PrefetchPolicy = "timeout"
    timeout: float = 1.0
    timeout_per_1k: float = 0.25
    share: float = 0.5


@dataclass(slots=True)
class StorageCounters:
    """What has happened since the start.

    Attributes:
        fetched: Pages read that passed their check.
        rejected: Pages read that did not.
        missing: Pages asked for, but gone.
        written: Pages written, or there already.
        dropped: Pages not written: too many writes were pending, or the store was failing.
        skipped: Requests that were not looked up because the store was failing or no host pages were left for them.
        timeouts: Requests that stopped waiting before all their pages were there.
        seconds_reading: Seconds that reads took, summed over calls.
        seconds_writing: Seconds that writes took, summed likewise.
    """

    fetched: int = 0
    rejected: int = 0
    missing: int = 0
    written: int = 0
    dropped: int = 0
    skipped: int = 0
    timeouts: int = 0
    seconds_reading: float = 0.0
    seconds_writing: float = 0.0


@dataclass(slots=True, eq=False)
class _Prefetch(Arrival):
    connection: Connection = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class _Fetched:
    good: list[bool]
    rejected: int
    seconds: float


class StorageTier:
    """The third tier, single-threaded except for the jobs that its executor runs.

    Args:
        host: The second tier's pages.
        pool: Their memory.
        page_size: Tokens in a page.
        options: How requests wait.
        clock: Seconds, monotonic.

    Attributes:
        counters: What has happened so far.
        connection: The attached store; None: there is none.
        arrivals: The pages that are being prefetched; its ``settle`` ends a prefetch.
        known: The pages that are known to be in the store.
        page_bytes: Bytes of the content of a page's object.
    """

    def __init__(
        self, host: HostPages, pool: HostPool, page_size: int, options: PrefetchOptions, clock: Callable[[], float]
    ) -> None:
        self.counters = StorageCounters()
        self.connection: Connection | None = None
        self.arrivals: Arrivals[_Prefetch] = Arrivals(host, options.share, clock)
        self.known = KnownObjects(_KNOWN_FOR_EACH_HOST_PAGE * host.num_pages)
        self._host = host
        self.page_bytes = pool.object_bytes
        self._past_failures = 0
        self._pool = pool
        self._page_size = page_size
        self._options = options
        self._clock = clock
        self._writing = 0
        self._closing: list[Connection] = []

    @property
    def failures(self) -> int:
        """Calls that failed or took too long, of all stores so far."""
        return self._past_failures + (0 if self.connection is None else self.connection.failures)

    @property
    def store_id(self) -> str:
        """The attached store's name, equal for all workers that share it; empty: there is none, or nothing is read from it."""
        connection = self.connection
        return connection.store_id if connection is not None and connection.worthwhile else ""

    @property
    def busy(self) -> bool:
        """Whether calls are pending that should end soon: a failing store does not count."""
        return bool(self._closing) or (
            self.connection is not None and self.connection.pending > 0 and not self.connection.breaker.is_open
        )

    def attach(self, connection: Connection) -> None:
        """Reads pages from this store and writes pages to it from now on; detaches the store before."""
        self.detach()
        self.connection = connection

    def detach(self) -> None:
        """Makes no further calls to the store; pending ones end by themselves."""
        if self.connection is not None:
            self.connection.close()
            self._past_failures += self.connection.failures
            self._closing.append(self.connection)
            self.connection = None
            self.known.clear()

    def prefetch(self, serial: int, wanted: list[PageName]) -> bool:
        """Looks for pages that a new request lacks; returns whether the request is to wait until :meth:`poll` names it."""
        connection = self.connection
        if connection is None or len(wanted) < connection.min_pages:
            return False
        wanted = wanted[: self.arrivals.room]
        if len(wanted) < max(1, connection.min_pages) or not connection.breaker.allow():
            self.counters.skipped += 1
            return False
        options, now = self._options, self._clock()
        patience = options.timeout + options.timeout_per_1k * len(wanted) * self._page_size / 1000
        deadline = now + (patience if options.policy == "timeout" else _LONGEST_WAIT)
        prefetch = _Prefetch(wanted, now, deadline, looking=True, connection=connection)
        self.arrivals.add(serial, prefetch)
        names = [object_name(connection.namespace, name.key) for name in wanted]
        connection.call(partial(connection.backend.exists, names), partial(self._found, prefetch), urgent=True)
        if options.policy == "best_effort":
            return False
        self.arrivals.held.add(serial)
        return True

    def write(self, entries: Sequence[HostPage]) -> None:
        """Queues writes of ready second-tier pages to the store; does not wait."""
        connection = self.connection
        if connection is None:
            return
        for batch in _batches(entries):
            if self._writing + len(batch) > max(BATCH_PAGES, self.arrivals.limit) or not connection.breaker.allow():
                self.counters.dropped += len(batch)
                continue
            self._host.pin(batch)
            self._writing += len(batch)
            connection.call(
                partial(self._put, connection, batch), partial(self._written, connection, batch), urgent=False
            )

    def clear(self, done: Callable[[str], None]) -> None:
        """Begins to remove this model's objects; a later :meth:`poll` calls ``done`` with the error, empty if it succeeded."""
        connection = self.connection
        if connection is None:
            done("no store is attached")
            return

        def ended(fine: bool | None) -> None:
            if fine and connection is self.connection:
                self.known.clear()
            done("" if fine else connection.last_error or "the store did not do it")

        def job() -> bool:
            connection.backend.clear(connection.namespace)
            return True

        connection.call(job, ended, urgent=True)

    def poll(self) -> list[int]:
        """Collects finished calls; returns the requests that no longer need to wait."""
        for connection in (*self._closing, *(() if self.connection is None else (self.connection,))):
            connection.poll()
        for connection in [each for each in self._closing if not each.pending]:
            connection.release()
            self._closing.remove(connection)
        now, arrivals = self._clock(), self.arrivals

        def is_over(prefetch: _Prefetch) -> bool:
            unfinished = arrivals.is_reading(prefetch)
            return not unfinished or now >= prefetch.deadline or prefetch.connection.breaker.is_open

        released = arrivals.release(is_over)
        self.counters.timeouts += sum(arrivals.is_reading(arrivals[serial]) for serial in released)
        return released

    def wait(self, seconds: float) -> None:
        """Waits until something has happened, or the given seconds are over."""
        for connection in (*self._closing[:1], *(() if self.connection is None else (self.connection,))):
            connection.wait(seconds)

    def check(self) -> dict[int, int]:
        """Compares the counts with what is held; returns the pins by host page. For tests.

        Raises:
            AssertionError: They disagree.
        """
        self.known.check()
        return self.arrivals.pins()

    @property
    def writing(self) -> int:
        """Pages pinned because they are being written to the store."""
        return self._writing

    def _found(self, prefetch: _Prefetch, count: int | None) -> None:
        connection = prefetch.connection
        prefetch.looking = False
        if count is not None and connection is self.connection:  # looked for only where it is worthwhile
            self.known.add(prefetch.wanted[:count])
            if count < len(prefetch.wanted):
                self.known.forget(prefetch.wanted[count])
        count = min(count or 0, self.arrivals.room)
        del prefetch.wanted[count:]
        if prefetch.cancelled or connection is not self.connection or count < connection.min_pages:
            prefetch.wanted.clear()
            return
        for batch in _batches(self.arrivals.reserve(prefetch.wanted)):
            connection.call(partial(self._get, prefetch, batch), partial(self._got, prefetch, batch), urgent=True)

    def _get(self, prefetch: _Prefetch, batch: list[HostPage]) -> _Fetched | None:
        """Reads and checks pages, in a thread of the executor."""
        if prefetch.cancelled:
            return None
        began = self._clock()
        connection = prefetch.connection
        names = [object_name(connection.namespace, entry.key) for entry in batch]
        with self._pool.arriving([entry.page for entry in batch]) as records:
            read = connection.backend.get(names, records)
            good = take_good(self._pool, batch, read, records, connection.namespace)
        # The store claims to have all of these. A bad or unreadable object would keep a good one from being written.
        useless = [name for name, fine in zip(names, good, strict=True) if not fine]
        if useless:
            with contextlib.suppress(StorageError):
                connection.backend.remove(useless)
        return _Fetched(good, sum(read) - sum(good), self._clock() - began)

    def _got(self, prefetch: _Prefetch, batch: list[HostPage], fetched: _Fetched | None) -> None:
        good = fetched.good if fetched is not None else [False] * len(batch)
        arrived = self.arrivals.came(prefetch, batch, good)
        if fetched is not None:
            for entry, fine in zip(batch, good, strict=True):
                if not fine:
                    self.known.forget(entry.name)
            self.counters.fetched += arrived
            self.counters.rejected += fetched.rejected
            self.counters.missing += len(batch) - arrived - fetched.rejected
            self.counters.seconds_reading += fetched.seconds

    def _put(self, connection: Connection, batch: list[HostPage]) -> tuple[list[bool], float]:
        """Seals and writes pages, in a thread of the executor; returns for each page whether the store has it now, and the
        seconds it took."""
        began = self._clock()
        names = [object_name(connection.namespace, entry.key) for entry in batch]
        with self._pool.objects([entry.page for entry in batch]) as records:
            for entry, record in zip(batch, records, strict=True):
                seal(record, entry.key, connection.namespace)
            return connection.backend.put(names, records), self._clock() - began

    def _written(self, connection: Connection, batch: list[HostPage], result: tuple[list[bool], float] | None) -> None:
        self._host.unpin(batch)
        self._writing -= len(batch)
        there, seconds = result if result is not None else ([False] * len(batch), 0.0)
        if connection is self.connection and connection.worthwhile:
            self.known.add([entry.name for entry, fine in zip(batch, there, strict=True) if fine])
        self.counters.written += sum(there)
        self.counters.dropped += len(batch) - sum(there)
        self.counters.seconds_writing += seconds


def _batches(entries: Sequence[HostPage]) -> Iterator[list[HostPage]]:
    for start in range(0, len(entries), BATCH_PAGES):
        yield list(entries[start : start + BATCH_PAGES])
