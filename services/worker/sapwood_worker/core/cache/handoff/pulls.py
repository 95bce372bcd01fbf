"""The other side of hand-offs: the pages of a ticket that this worker lacks are read into host pages while their request waits.

States of a request with a ticket::

    (let in) --pages are lacking--> PULLING --all reads have ended------> (starts with what has come; computes the rest)
       |                               |-----its patience is over--------^
       '--nothing is lacking-----------'-----aborted--> (gone; reads under way end by themselves)

What a read brought is checked byte by byte (``storage/record.py``): it becomes a page of the second tier, pinned until the
request starts, or is thrown away. A page is given back only when the read into it has ended. Nothing here blocks: reads run in
other threads. Bound: pulls hold at most ``share`` of the host pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from sapwood_worker.core.cache.handoff.mover import PageMover
from sapwood_worker.core.cache.host_pages import HostPage, HostPages
from sapwood_worker.core.cache.page_key import PageName
from sapwood_worker.core.cache.storage.executor import Executor
from sapwood_worker.core.cache.storage.record import verify
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.handoff import HandoffTicket

BATCH = 16
"""Pages of a read: few, so that a prompt of 1000 tokens is read by several at once; a connection carries 1 to 2 GB/s."""
READS = 8
"""Reads at a time."""
PATIENCE_SECONDS = 5.0
"""How long a request waits for its pages. A source that is gone is noticed sooner, by the mover."""


@dataclass(slots=True)
class PullCounters:
    """What has happened since the start.

    Attributes:
        pages: Pages pulled that passed their check.
        stale: Pages that the source no longer had, or that failed their check.
        failures: Reads that failed: the source was gone or silent.
        fallbacks: Requests with a ticket that had to compute what the ticket was for, in whole or in part.
        seconds: Seconds that reads took, summed.
    """

    pages: int = 0
    stale: int = 0
    failures: int = 0
    fallbacks: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Pull:
    """What one request lacks. Those of ``wanted`` before ``cursor`` are not being read any more."""

    wanted: list[PageName]
    deadline: float
    began: float
    ended: float = 0.0
    cursor: int = 0
    cancelled: bool = False
    pinned: list[HostPage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Read:
    good: list[bool]
    seconds: float


class Pulls:
    """Pulls under way. Single-threaded but for the reads that its executor runs.

    Args:
        host: The second tier's pages.
        pool: Their memory.
        fingerprint: What this worker's pages hold besides tokens.
        mover: Reads.
        executor: Where reads run.
        share: The most of the host pages that pulls hold at once.
        clock: Seconds, monotonic.

    Attributes:
        counters: What has happened so far.
        page_bytes: Bytes of a page's content.
    """

    def __init__(
        self,
        host: HostPages,
        pool: HostPool,
        fingerprint: bytes,
        mover: PageMover,
        executor: Executor,
        share: float,
        clock: Callable[[], float],
    ) -> None:
        self.counters = PullCounters()
        self.page_bytes = pool.page_bytes
        self._host = host
        self._pool = pool
        self._fingerprint = fingerprint
        self._mover = mover
        self._executor = executor
        self._limit = int(share * host.num_pages)
        self._clock = clock
        self._pulls: dict[int, _Pull] = {}
        self._held: set[int] = set()
        self._reading: set[bytes] = set()
        self._occupied = 0

    @property
    def busy(self) -> bool:
        """Whether reads are under way."""
        return bool(self._reading)

    @property
    def reading(self) -> int:
        """Host pages that are reserved for reads that have not ended."""
        return len(self._reading)

    def pull(self, serial: int, wanted: list[PageName], first: int, ticket: HandoffTicket) -> bool:
        """Reads pages that a new request lacks; returns whether it is to wait until :meth:`poll` names it.

        Args:
            serial: The request.
            wanted: What it lacks, in order.
            first: Where in its prompt that begins, in pages.
            ticket: Its ticket.
        """
        fits = ticket.fingerprint == self._fingerprint
        hashes = ticket.page_hashes[first:]
        count, most = 0, min(len(wanted), len(hashes)) if fits else 0
        while count < most and wanted[count].key.hash == hashes[count]:
            count += 1
        pull = self._pulls[serial] = _Pull(wanted[:count], self._clock() + PATIENCE_SECONDS, self._clock())
        # Pages that another request is having read are waited for, not read again.
        entries = self._host.reserve(pull.wanted[: max(0, self._limit - self._occupied)])
        self._occupied += len(entries)
        self._reading.update(entry.key.hash for entry in entries)
        index_of = {name.key.hash: first + index for index, name in enumerate(pull.wanted)}
        for start in range(0, len(entries), BATCH):
            batch = entries[start : start + BATCH]
            indices = [index_of[entry.key.hash] for entry in batch]
            done = partial(self._took, pull, batch)
            self._executor.submit(partial(self._read, pull, ticket, indices, batch), done, urgent=True)
        if not pull.wanted:
            self.counters.fallbacks += bool(wanted) and not (fits and 0 < len(ticket.page_hashes) <= first)
            return False
        self._held.add(serial)
        return True

    def settle(self, serial: int) -> tuple[int, float, float] | None:
        """Keeps nothing any longer for a request that has started or ended.

        Returns:
            How many pages were pulled, and when the first was asked for and the last had come, by the clock; None: no pages.
        """
        pull = self._pulls.pop(serial, None)
        self._held.discard(serial)
        if pull is None:
            return None
        pull.cancelled = True
        self._host.unpin(pull.pinned)
        self._occupied -= len(pull.pinned)
        return (len(pull.pinned), pull.began, pull.ended) if pull.pinned else None

    def poll(self) -> list[int]:
        """Takes the ends of reads; returns the requests that need not wait any longer."""
        self._executor.poll()
        now = self._clock()
        released = [
            serial
            for serial in self._held
            if now >= self._pulls[serial].deadline or not self._is_reading(self._pulls[serial])
        ]
        self._held.difference_update(released)
        for serial in released:
            wanted = [name.key for name in self._pulls[serial].wanted]
            self.counters.fallbacks += len(self._host.match(wanted)) < len(wanted)
        return released

    def wait(self, seconds: float) -> None:
        """Returns when a read has ended, or after so many seconds."""
        self._executor.wait(seconds)

    def pins(self) -> dict[int, int]:
        """Compares the counts with what is held; returns how often each host page is pinned. For tests.

        Raises:
            AssertionError: They disagree.
        """
        count: dict[int, int] = {}
        for pull in self._pulls.values():
            for entry in pull.pinned:
                count[entry.page] = count.get(entry.page, 0) + 1
        assert self._occupied == sum(count.values()) + len(self._reading), "pulled pages were miscounted"
        assert self._occupied <= self._limit, "pulls hold more than their share"
        assert self._held <= self._pulls.keys()
        return count

    def _is_reading(self, pull: _Pull) -> bool:
        while pull.cursor < len(pull.wanted):
            if pull.wanted[pull.cursor].key.hash in self._reading:
                return True
            pull.cursor += 1
        return False

    def _read(self, pull: _Pull, ticket: HandoffTicket, indices: list[int], batch: list[HostPage]) -> _Read | None:
        """Reads and checks pages, in a thread of the executor."""
        if pull.cancelled:
            return None
        began = self._clock()
        records = [self._pool.record(entry.page) for entry in batch]
        read = self._mover.read(ticket, indices, records)
        namespace = self._fingerprint.hex()
        good = [
            there and verify(record, entry.key, namespace)
            for there, record, entry in zip(read, records, batch, strict=True)
        ]
        return _Read(good, self._clock() - began)

    def _took(self, pull: _Pull, batch: list[HostPage], read: _Read | None, error: Exception | None) -> None:
        good = read.good if read is not None else [False] * len(batch)
        arrived = [entry for entry, fine in zip(batch, good, strict=True) if fine]
        self._reading.difference_update(entry.key.hash for entry in batch)
        self._host.written(arrived)
        self._host.abandon([entry for entry, fine in zip(batch, good, strict=True) if not fine])
        if pull.cancelled:
            self._occupied -= len(batch)
        else:
            self._occupied -= len(batch) - len(arrived)
            self._host.pin(arrived)
            pull.pinned += arrived
            pull.ended = self._clock()
        counters = self.counters
        counters.pages += len(arrived)
        counters.failures += error is not None
        if read is not None:
            counters.stale += len(batch) - len(arrived)
            counters.seconds += read.seconds
