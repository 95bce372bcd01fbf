"""The other side of hand-offs: the pages of a ticket that this worker lacks are read into host pages while their request waits.

States of a request with a ticket::

    (let in) --pages are lacking--> PULLING --all reads have ended------> (starts with what has come; computes the rest)
       |                               |-----its patience is over--------^
       '--nothing is lacking-----------'-----aborted--> (gone; reads under way end by themselves)

What a read brought is checked byte by byte (``storage/record.py``): it becomes a page of the second tier (``arrivals.py``), or is
thrown away. Nothing here blocks: reads run in other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sapwood_worker.core.cache.arrivals import Arrival, Arrivals
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
        arrivals: The pages that are pulled; its ``settle`` ends a pull.
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
        self.arrivals: Arrivals[Arrival] = Arrivals(host, share, clock)
        self.page_bytes = pool.object_bytes
        self._host = host
        self._pool = pool
        self._fingerprint = fingerprint
        self._mover = mover
        self._executor = executor
        self._clock = clock

    @property
    def busy(self) -> bool:
        """Whether reads are under way."""
        return self.arrivals.reading > 0

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
        now = self._clock()
        pull = Arrival(wanted[:count], now, now + PATIENCE_SECONDS)
        self.arrivals.add(serial, pull)
        # Pages that another request is having read are waited for, not read again.
        entries = self.arrivals.reserve(pull.wanted)
        index_of = {name.key.hash: first + index for index, name in enumerate(pull.wanted)}
        for start in range(0, len(entries), BATCH):
            batch = entries[start : start + BATCH]
            indices = [index_of[entry.key.hash] for entry in batch]
            done = partial(self._took, pull, batch)
            self._executor.submit(partial(self._read, pull, ticket, indices, batch), done, urgent=True)
        if not pull.wanted:
            self.counters.fallbacks += bool(wanted) and not (fits and 0 < len(ticket.page_hashes) <= first)
            return False
        self.arrivals.held.add(serial)
        return True

    def poll(self) -> list[int]:
        """Takes the ends of reads; returns the requests that need not wait any longer."""
        self._executor.poll()
        now = self._clock()
        released = self.arrivals.release(lambda pull: now >= pull.deadline or not self.arrivals.is_reading(pull))
        for serial in released:
            wanted = [name.key for name in self.arrivals[serial].wanted]
            self.counters.fallbacks += len(self._host.match(wanted)) < len(wanted)
        return released

    def wait(self, seconds: float) -> None:
        """Returns when a read has ended, or after so many seconds."""
        self._executor.wait(seconds)

    def _read(self, pull: Arrival, ticket: HandoffTicket, indices: list[int], batch: list[HostPage]) -> _Read | None:
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
        for entry, fine in zip(batch, good, strict=True):
            if fine:
                self._pool.unpack(entry.page)
        return _Read(good, self._clock() - began)

    def _took(self, pull: Arrival, batch: list[HostPage], read: _Read | None, error: Exception | None) -> None:
        good = read.good if read is not None else [False] * len(batch)
        arrived = self.arrivals.came(pull, batch, good)
        counters = self.counters
        counters.pages += arrived
        counters.failures += error is not None
        if read is not None:
            counters.stale += len(batch) - arrived
            counters.seconds += read.seconds
