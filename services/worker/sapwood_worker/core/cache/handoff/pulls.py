"""The receiving side of hand-offs: reads the pages of a ticket that this worker lacks into pages of its own (``tiering.py``,
``landing.py``) while their request waits; announced pages even before it comes, while the source computes the rest.

States of a request with a ticket::

    (let in) --pages are lacking--> PULLING --all reads have ended------> (starts with what has come; computes the rest)
       |                               |-----its patience is over--------^
       '--nothing is lacking-----------'-----aborted--> (gone; reads under way end by themselves)

Announced pages are pinned until the request comes and goes on with them, or until nothing was heard of them for ``NEWS_SECONDS``.
What a read brought is checked, and becomes a page of a tier, or is thrown away. Nothing here blocks: reads run in other threads,
and begin when nobody uses the pages that they fill any more.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sapwood_worker.core.cache.handoff.mover import PartCount
from sapwood_worker.core.cache.host.arrivals import Arrival, ArrivalPages, Arrivals
from sapwood_worker.core.cache.host.host_pages import HostPage
from sapwood_worker.core.cache.page_key import PageKey, PageName
from sapwood_worker.core.cache.storage.executor import Executor
from sapwood_worker.model.pools.host_pool import ARRIVING_PAGES
from sapwood_worker.records.handoff import HandoffTicket, log_stage

logger = logging.getLogger(__name__)

READS = 16
"""Reads at a time."""
PATIENCE_SECONDS = 5.0
"""How long a request waits for its pages. A source that is gone is noticed sooner, by the mover."""

NEWS_SECONDS = 1.5
"""How long announced pages are pinned after the last announcement: as long as a lease that nobody renews."""
_MEMORY_SECONDS = 30.0
"""How long after it a prompt is remembered, of which only the first announcement tells: a chunk may take long to compute."""


@dataclass(slots=True)
class PullCounters:
    """What has happened since the start.

    Attributes:
        pages: Pages pulled that passed their check.
        early: Of these, pages that had come before the request that needed them: while the source computed the rest.
        stale: Pages that the source no longer had, or that failed their check.
        failures: Reads that failed: the source was gone or silent.
        fallbacks: Requests with a ticket that had to compute what the ticket was for, in whole or in part.
        seconds: Seconds that reads took, summed.
    """

    pages: int = 0
    early: int = 0
    stale: int = 0
    failures: int = 0
    fallbacks: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Pull(Arrival):
    """What a request lacks; ``early``: it is not here yet."""

    early: bool = False


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One of which pages are announced: its place in the ledger, all of its pages, how many of them the first tier had."""

    serial: int
    pages: list[PageName]
    cached: int


@dataclass(frozen=True, slots=True)
class _Read:
    good: list[bool]
    seconds: float


class Ground(ArrivalPages, Protocol):
    """Where pulled pages go.

    Attributes:
        batch: Pages of a read.
        early_reads: Reads of pages that are announced together: each may last as long as the source computes them.
        page_bytes: Bytes of a page's content.
        parts: Counts what came of pages before all of their layers were computed.
    """

    batch: int
    early_reads: int
    page_bytes: int
    parts: PartCount

    def writable(self, entries: Sequence[HostPage]) -> bool:
        """Whether nothing uses what these pages held before."""
        ...

    def read(self, ticket: HandoffTicket, indices: Sequence[int], entries: Sequence[HostPage]) -> list[bool]:
        """Reads pages of a ticket; returns which are what it says. Called from several threads; raises as a mover's."""
        ...

    def released(self, serial: int, wanted: Sequence[PageKey]) -> bool:
        """A request waits no longer; returns whether all that it wanted is there."""
        ...


class Pulls:
    """Pulls under way. Single-threaded but for the reads that its executor runs.

    Args:
        ground: Where pages go.
        fingerprint: What this worker's pages hold besides tokens.
        executor: Where reads run.
        share: The most of the ground's pages that pulls hold at once.
        clock: Seconds, monotonic.
        counters: Others', to be counted in; None: new ones.

    Attributes:
        counters: What has happened so far.
        arrivals: The pages that are pulled; its ``settle`` ends a pull.
        page_bytes: Bytes of a page's content.
    """

    def __init__(
        self,
        ground: Ground,
        fingerprint: bytes,
        executor: Executor,
        share: float,
        clock: Callable[[], float],
        counters: PullCounters | None = None,
    ) -> None:
        self.counters = counters or PullCounters()
        self.arrivals: Arrivals[_Pull] = Arrivals(ground, share, clock)
        self._announced: dict[bytes, _Prompt] = {}
        self._serials = itertools.count(-1, -1)  # below those of requests
        self.page_bytes = ground.page_bytes
        self._ground = ground
        self._fingerprint = fingerprint
        self._strangers: set[str] = set()
        """Sources whose pages are of no use here, as was said."""
        self._executor = executor
        self._clock = clock
        self._due: deque[tuple[_Pull, HandoffTicket, list[int], list[HostPage]]] = deque()

    @property
    def part_bytes(self) -> int:
        """Bytes that came before all layers of their pages were computed."""
        return self._ground.parts.bytes

    @property
    def busy(self) -> bool:
        """Whether reads are under way."""
        return self.arrivals.reading > 0

    def knows(self, ticket: HandoffTicket) -> bool:
        """Whether pages of this transfer were announced."""
        return ticket.transfer_id in self._announced

    def announced_pages(self, ticket: HandoffTicket) -> Sequence[PageName]:
        """All pages of the prompt of which some were announced; none if none were."""
        prompt = self._announced.get(ticket.transfer_id)
        return () if prompt is None else prompt.pages

    def pull(self, serial: int, wanted: list[PageName], first: int, ticket: HandoffTicket) -> bool:
        """Reads pages that a new request lacks; returns whether it is to wait until :meth:`poll` names it.

        Args:
            serial: The request.
            wanted: What it lacks, in order.
            first: Where in its prompt that begins, in pages.
            ticket: Its ticket.
        """
        now, announced = self._clock(), self._announced.pop(ticket.transfer_id, None)
        if announced is None:
            pull = _Pull([], now, now)
            self.arrivals.add(serial, pull)
        else:
            pull = self.arrivals.move(announced.serial, serial)
        pull.early, pull.deadline = False, now + PATIENCE_SECONDS
        if not self._begin(pull, wanted, first, ticket) and not self.arrivals.is_reading(pull):
            self.counters.fallbacks += bool(wanted) and not (
                self._fits(ticket) and 0 < len(ticket.page_hashes) <= first
            )
            return False
        self.arrivals.held.add(serial)
        return True

    def announced(self, ticket: HandoffTicket, pages: list[PageName], cached: int) -> None:
        """Reads pages that are lacking for a request which is likely to come.

        Args:
            ticket: For some of its prompt's pages.
            pages: All of the prompt's; empty if an earlier call for the same transfer had them.
            cached: How many of them the first tier has, as far as it was asked.
        """
        prompt, now = self._announced.get(ticket.transfer_id), self._clock()
        if prompt is None and pages:
            prompt = self._announced[ticket.transfer_id] = _Prompt(next(self._serials), pages, cached)
            self.arrivals.add(prompt.serial, _Pull([], now, now, early=True))
        if prompt is not None:
            pull = self.arrivals[prompt.serial]
            pull.deadline = now + NEWS_SECONDS
            first = max(prompt.cached, ticket.first_page)
            self._begin(pull, prompt.pages[first:], first, ticket)

    def lapse(self) -> None:
        """Lets go of announced pages of which nothing was heard for long."""
        now = self._clock()
        for transfer_id, prompt in tuple(self._announced.items()):
            pull = self.arrivals[prompt.serial]
            if now >= pull.deadline:
                self.arrivals.let_go(pull)
            if now >= pull.deadline + _MEMORY_SECONDS:
                del self._announced[transfer_id]
                self.arrivals.settle(prompt.serial)

    def _begin(self, pull: _Pull, wanted: list[PageName], first: int, ticket: HandoffTicket) -> int:
        """Begins to read those of ``wanted``, the prompt's pages from the ``first`` on, that a ticket names; returns how many
        that are."""
        hashes = ticket.page_hashes[first - ticket.first_page :]
        count, most = 0, min(len(wanted), len(hashes)) if self._fits(ticket) else 0
        while count < most and wanted[count].key.hash == hashes[count]:
            count += 1
        wanted = wanted[:count]
        pull.wanted += wanted
        # Pages that another request is having read are waited for, not read again.
        entries = self.arrivals.reserve(wanted)
        index_of = {name.key.hash: first + index for index, name in enumerate(wanted)}
        each = self._ground.batch
        if pull.early:
            each = max(each, min(-(-len(entries) // self._ground.early_reads), ARRIVING_PAGES))
        for start in range(0, len(entries), each):
            batch = entries[start : start + each]
            self._due.append((pull, ticket, [index_of[entry.key.hash] for entry in batch], batch))
        self._submit()
        return count

    def _fits(self, ticket: HandoffTicket) -> bool:
        """Whether a source's pages are of use here; says so once if they are not, as then its prompts are computed twice."""
        fits = ticket.fingerprint == self._fingerprint
        if not fits and ticket.source not in self._strangers:
            self._strangers.add(ticket.source)
            logger.warning(
                "pages of %s cannot be read: model, dtype, --kv-cache-dtype, --page-size or device is another, or a limit of the "
                "context by which pages are laid out or positions are scaled; all prompts from there are computed again",
                ticket.source,
            )
        return fits

    def _submit(self) -> None:
        while self._due and self._ground.writable(self._due[0][3]):
            pull, ticket, indices, batch = self._due.popleft()
            done = partial(self._took, pull, batch)
            self._executor.submit(partial(self._read, pull, ticket, indices, batch), done, urgent=True)

    def poll(self) -> list[int]:
        """Takes the ends of reads; returns the requests that need not wait any longer."""
        self._submit()
        self._executor.poll()
        now = self._clock()
        released = self.arrivals.release(lambda pull: now >= pull.deadline or not self.arrivals.is_reading(pull))
        for serial in released:
            wanted = [name.key for name in self.arrivals[serial].wanted]
            self.counters.fallbacks += not self._ground.released(serial, wanted)
        return released

    def wait(self, seconds: float) -> None:
        """Returns when a read has ended, or after so many seconds."""
        self._executor.wait(seconds)

    def _read(self, pull: _Pull, ticket: HandoffTicket, indices: list[int], batch: list[HostPage]) -> _Read | None:
        """Reads and checks pages, in a thread of the executor."""
        if pull.cancelled:
            return None
        began = self._clock()
        log_stage("read begins")
        good = self._ground.read(ticket, indices, batch)
        log_stage("read ends")
        return _Read(good, self._clock() - began)

    def _took(self, pull: _Pull, batch: list[HostPage], read: _Read | None, error: Exception | None) -> None:
        good = read.good if read is not None else [False] * len(batch)
        arrived = self.arrivals.came(pull, batch, good)
        counters = self.counters
        counters.pages += arrived
        counters.early += arrived if pull.early else 0
        counters.failures += error is not None
        if read is not None:
            counters.stale += len(batch) - arrived
            counters.seconds += read.seconds
