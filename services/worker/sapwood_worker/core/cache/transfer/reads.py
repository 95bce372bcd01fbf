"""The receiving side of KV transfers: reads pages that another worker keeps, into the device's pages or the host's."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from sapwood_worker.core.cache.host import Arrival, ArrivalPages, Arrivals, HostPage
from sapwood_worker.core.cache.page_key import PageKey, PageName
from sapwood_worker.core.cache.pages import PageIds
from sapwood_worker.core.cache.storage.backend import Executor
from sapwood_worker.core.cache.storage.record import verify
from sapwood_worker.core.cache.transfer.transfer_backend import PartCount, TransferBackend
from sapwood_worker.model.pools.host_pool import ARRIVING_PAGES, HEADER_BYTES
from sapwood_worker.records.handoff import HandoffTicket, log_stage

# Device pages that another worker's device fills: so a prompt transferred within a host does not pass through host memory, and
# is not copied to the device when its request starts.
#
# A page is taken from the prefix cache's room (free or evictable), and a transfer owns it until its request may start.
# Then pages that continue the cached part of the prompt are shared as if they had been computed here, and the others are given
# back. A page is written only after all steps that were launched before it was taken are over, and every copy of its old
# content has ended. There is no checksum, because the device moves the bytes. After a read the source says whether its pages
# still had the ticket's content (``cuda_ipc.py``). Pages that the source's device no longer has come through host memory, and
# are checked there.


logger = logging.getLogger(__name__)


_BATCH = 256
"""Pages of one read. A GPU's copy engines move hundreds of GB/s, so most of a read's time is its messages."""
_THROUGH_HOST = 16
"""How many pages at a time are read through host memory, because the source's device no longer has them."""


class DeviceRoom(Protocol):
    """The pool of device pages that KV transfers take pages from and share them in."""

    @property
    def taken(self) -> Set[int]:
        """The pages that are taken."""
        ...

    @property
    def num_takable(self) -> int:
        """How many pages could be taken now."""
        ...

    def take(self, count: int) -> PageIds:
        """Takes up to ``count`` pages."""
        ...

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages that were taken."""
        ...

    def adopt(self, prompt: Prompt, filled: Callable[[int], int | None]) -> int:
        """Shares pages that were taken, and frees those whose tokens are cached already.

        Args:
            prompt: Whose they are.
            filled: For each index of the prompt's pages, the page that was filled with it; None: no page was.

        Returns:
            How many pages of the prompt are cached now.
        """
        ...


class DeviceTransferBackend(TransferBackend, Protocol):
    """A backend that can also read into device pages."""

    def reaches(self, ticket: HandoffTicket) -> bool:
        """Whether, as far as is known, a ticket's source has pages on a device that this worker can read."""
        ...

    def read_to_device(
        self, ticket: HandoffTicket, indices: Sequence[int], pages: Sequence[int], proofs: Sequence[bytes]
    ) -> list[bool | None]:
        """Reads into device pages. Returns for each page whether it came with the given proof; None if the source's device does
        not have it."""
        ...

    def fill(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Fills device pages from host memory."""
        ...

    def barrier(self) -> Callable[[], None]:
        """Returns a function that waits until everything launched before now is over."""
        ...


@dataclass(slots=True, eq=False)
class _ReceivedPage(HostPage):
    """A page that is or was being filled, and the number of steps launched before."""

    after: int = 0
    barrier: Callable[[], None] = lambda: None


class Prompt(NamedTuple):
    """A request's tokens that may come from the cache, within which namespace, and their pages."""

    token_ids: array[int]
    namespace: bytes
    pages: list[PageName]


class ReceivingDevice(Protocol):
    """What the tiers know about the device's pages.

    Attributes:
        room: The pool that pages are taken from; set before the first page is taken.
        steps: Returns how many steps were launched, and how many of them have ended.
    """

    room: DeviceRoom
    steps: Callable[[], tuple[int, int]]

    def is_storing(self, page: int) -> bool:
        """Whether the present or former content of a page is being copied."""
        ...


class ReceiveBuffer:
    """The ledger of device pages that reads fill. Single-threaded except for :meth:`read`.

    Args:
        device: The device's pages.
        num_pages: How many there are.
        page_bytes: Bytes of a page's content.
        fingerprint: A hash of everything besides tokens that pages depend on.
        backend: Reads.

    Attributes:
        batch, early_reads: As :class:`~sapwood_worker.core.cache.transfer.reads.Ground` has it.
        num_pages, page_bytes: The arguments.
        parts: Counts bytes that arrived before all layers of their pages were computed.
    """

    batch, early_reads = _BATCH, 1

    def __init__(
        self,
        device: ReceivingDevice,
        num_pages: int,
        page_bytes: int,
        fingerprint: bytes,
        backend: DeviceTransferBackend,
    ) -> None:
        self._device = device
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.parts = backend.parts
        self._fingerprint = fingerprint
        self._backend = backend
        self._entries: dict[bytes, _ReceivedPage] = {}
        self._prompts: dict[int, Prompt] = {}

    @property
    def room(self) -> int:
        """How many pages could be reserved now."""
        return self._device.room.num_takable

    def reaches(self, ticket: HandoffTicket) -> bool:
        """As :meth:`DeviceTransferBackend.reaches`."""
        return self._backend.reaches(ticket)

    def expect(self, serial: int, prompt: Prompt) -> None:
        """Notes which prompt a request has."""
        self._prompts[serial] = prompt

    def forget(self, serial: int) -> None:
        """A request has started or ended."""
        self._prompts.pop(serial, None)

    def released(self, serial: int, wanted: Sequence[PageKey]) -> bool:
        """Ends a request's wait: shares the pages of its prompt that have arrived; returns whether all wanted pages are cached
        now."""
        prompt = self._prompts[serial]
        keys = [page.key for page in prompt.pages]

        def filled(index: int) -> int | None:
            entry = self._find(keys[index]) if index < len(keys) else None
            return None if entry is None else self._entries.pop(entry.key.hash).page

        cached = self._device.room.adopt(prompt, filled)
        return not wanted or keys.index(wanted[-1]) < cached

    def reserve(self, wanted: Sequence[PageName]) -> list[HostPage]:
        """As :meth:`HostPages.reserve`."""
        new = {name.key.hash: name for name in wanted if name.key.hash not in self._entries}
        pages = self._device.room.take(len(new)).tolist()
        (launched, _), barrier = self._device.steps(), self._backend.barrier()
        taken = [_ReceivedPage(name, page, after=launched, barrier=barrier) for name, page in zip(new.values(), pages)]  # noqa: B905 - there may be fewer pages
        self._entries.update((entry.key.hash, entry) for entry in taken)
        return list(taken)

    def written(self, entries: Sequence[HostPage]) -> None:
        """As :meth:`HostPages.written`."""
        for entry in entries:
            entry.ready = True

    def abandon(self, entries: Sequence[HostPage]) -> None:
        """As :meth:`HostPages.abandon`."""
        self._drop(entries)

    def pin(self, entries: Sequence[HostPage]) -> None:
        """As :meth:`HostPages.pin`."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Sequence[HostPage]) -> None:
        """Takes one pin back from each; pages without pins are given back, unless they are shared."""
        for entry in entries:
            entry.pins -= 1
        self._drop(entry for entry in entries if not entry.pins and self._entries.get(entry.key.hash) is entry)

    def writable(self, entries: Sequence[HostPage]) -> bool:
        """Whether, as far as the scheduler knows, nothing uses the old content of these pages."""
        _, ended = self._device.steps()
        return all(self._entry(each).after <= ended and not self._device.is_storing(each.page) for each in entries)

    def read(self, ticket: HandoffTicket, indices: Sequence[int], entries: Sequence[HostPage]) -> list[bool]:
        """Reads pages of a ticket; returns which pages have the ticket's content. Called from several threads."""
        for barrier in {self._entry(each).barrier for each in entries}:
            barrier()
        proofs = [entry.key.proof for entry in entries]
        found = self._backend.read_to_device(ticket, indices, [entry.page for entry in entries], proofs)
        left = [place for place, there in enumerate(found) if there is None]
        for start in range(0, len(left), _THROUGH_HOST):
            self._read_through_host(ticket, indices, entries, left[start : start + _THROUGH_HOST], found)
        return list(map(bool, found))

    def _read_through_host(
        self,
        ticket: HandoffTicket,
        indices: Sequence[int],
        entries: Sequence[HostPage],
        places: Sequence[int],
        found: list[bool | None],
    ) -> None:
        """Reads the pages at some places of a read through host memory; sets which of them have the ticket's content."""
        records = [memoryview(np.empty(HEADER_BYTES + self.page_bytes, np.uint8).data) for _ in places]
        read = self._backend.read(ticket, [indices[place] for place in places], records)
        namespace = self._fingerprint.hex()
        good = {
            place: record[HEADER_BYTES:]
            for place, there, record in zip(places, read, records, strict=True)
            if there and verify(record, entries[place].key, namespace)
        }
        self._backend.fill([entries[place].page for place in good], list(good.values()))
        for place in places:
            found[place] = place in good

    def check(self, pins: Mapping[int, int]) -> None:
        """Compares the taken pages with the pins of each page; for tests.

        Raises:
            AssertionError: They disagree.
        """
        pages = {entry.page: entry for entry in self._entries.values()}
        assert len(pages) == len(self._entries), "a page is filled twice"
        ready = {page: entry.pins for page, entry in pages.items() if entry.ready}
        assert all(0 < count <= pins.get(page, 0) for page, count in ready.items()), "a page waits for nobody"
        assert pages.keys() == self._device.room.taken, "a page was taken and is not filled"

    def _find(self, key: PageKey) -> _ReceivedPage | None:
        entry = self._entries.get(key.hash)
        return entry if entry is not None and entry.ready and entry.key.proof == key.proof else None

    def _entry(self, entry: HostPage) -> _ReceivedPage:
        assert isinstance(entry, _ReceivedPage)
        return entry

    def _drop(self, entries: Iterable[HostPage]) -> None:
        gone = list(entries)
        for entry in gone:
            del self._entries[entry.key.hash]
        self._device.room.give_back([entry.page for entry in gone])


# The receiving side of KV transfers: reads the pages of a ticket that this worker lacks into pages of its own
# (``tiering.py``, :class:`ReceiveBuffer`) while their request waits; announced pages even before it comes, while the source
# computes the rest.
#
# States of a request with a ticket::
#
#     (let in) --pages are lacking--> READING --all reads have ended------> (starts with what has come; computes the rest)
#        |                               |-----its patience is over--------^
#        '--nothing is lacking-----------'-----aborted--> (gone; reads under way end by themselves)
#
# Announced pages are pinned until the request arrives and uses them, or until no message named them for ``NEWS_SECONDS``. A
# page that was read is checked, and becomes a page of a tier or is thrown away. Nothing here blocks: reads run in other
# threads, and begin when the pages that they fill are no longer in use.


READS = 16
"""Reads at a time."""
PATIENCE_SECONDS = 5.0
"""How long a request waits for its pages. A source that is gone is noticed sooner, by the backend."""

NEWS_SECONDS = 1.5
"""How long announced pages are pinned after the last announcement: as long as a lease that nobody renews."""
_MEMORY_SECONDS = 30.0
"""How long an announced prompt is remembered after its last announcement. Only the first one carries the prompt, and a chunk may
take long to compute."""


@dataclass(slots=True)
class ReadCounters:
    """What has happened since the start.

    Attributes:
        pages: Pages read that passed their check.
        early: How many of these arrived before their request, while the source computed the rest.
        stale: Pages that the source no longer had, or that failed their check.
        failures: Reads that failed: the source was gone or silent.
        fallbacks: Requests that had to compute some or all of the pages named in their ticket.
        seconds: Seconds that reads took, summed.
    """

    pages: int = 0
    early: int = 0
    stale: int = 0
    failures: int = 0
    fallbacks: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _PendingRead(Arrival):
    """The pages that a request lacks; ``early``: the request has not arrived yet."""

    early: bool = False


@dataclass(frozen=True, slots=True)
class _Prompt:
    """An announced prompt: its place in the ledger, all of its pages, and how many of them the first tier had."""

    serial: int
    pages: list[PageName]
    cached: int


@dataclass(frozen=True, slots=True)
class _Read:
    good: list[bool]
    seconds: float


class Ground(ArrivalPages, Protocol):
    """The memory that reads fill.

    Attributes:
        batch: Pages of a read.
        early_reads: How many reads of announced pages may run at once: each may last until the source has computed its pages.
        page_bytes: Bytes of a page's content.
        parts: Counts bytes that arrived before all layers of their pages were computed.
    """

    batch: int
    early_reads: int
    page_bytes: int
    parts: PartCount

    def writable(self, entries: Sequence[HostPage]) -> bool:
        """Whether the old content of these pages is no longer in use."""
        ...

    def read(self, ticket: HandoffTicket, indices: Sequence[int], entries: Sequence[HostPage]) -> list[bool]:
        """Reads pages of a ticket; returns which pages have the ticket's content. Called from several threads; raises a backend's
        errors."""
        ...

    def released(self, serial: int, wanted: Sequence[PageKey]) -> bool:
        """Ends a request's wait; returns whether all wanted pages are there."""
        ...


class PageReads:
    """The reads under way. Single-threaded except for the reads that its executor runs.

    Args:
        ground: Where pages go.
        fingerprint: What this worker's pages hold besides tokens.
        executor: Where reads run.
        share: The most of the ground's pages that reads hold at once.
        clock: Seconds, monotonic.
        counters: Counters of another object to share; None: new ones.

    Attributes:
        counters: What has happened so far.
        arrivals: The pages that are being read; its ``settle`` ends a read.
        page_bytes: Bytes of a page's content.
    """

    def __init__(
        self,
        ground: Ground,
        fingerprint: bytes,
        executor: Executor,
        share: float,
        clock: Callable[[], float],
        counters: ReadCounters | None = None,
    ) -> None:
        self.counters = counters or ReadCounters()
        self.arrivals: Arrivals[_PendingRead] = Arrivals(ground, share, clock)
        self._announced: dict[bytes, _Prompt] = {}
        self._serials = itertools.count(-1, -1)  # below those of requests
        self.page_bytes = ground.page_bytes
        self._ground = ground
        self._fingerprint = fingerprint
        self._strangers: set[str] = set()
        """Sources whose pages do not fit this worker; a warning was logged for each."""
        self._executor = executor
        self._clock = clock
        self._due: deque[tuple[_PendingRead, HandoffTicket, list[int], list[HostPage]]] = deque()

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
        """All pages of an announced prompt; none if no page of it was announced."""
        prompt = self._announced.get(ticket.transfer_id)
        return () if prompt is None else prompt.pages

    def start(self, serial: int, wanted: list[PageName], first: int, ticket: HandoffTicket) -> bool:
        """Reads pages that a new request lacks; returns whether it is to wait until :meth:`poll` names it.

        Args:
            serial: The request.
            wanted: What it lacks, in order.
            first: The index of the first wanted page in the prompt.
            ticket: Its ticket.
        """
        now, announced = self._clock(), self._announced.pop(ticket.transfer_id, None)
        if announced is None:
            pending = _PendingRead([], now, now)
            self.arrivals.add(serial, pending)
        else:
            pending = self.arrivals.move(announced.serial, serial)
        pending.early, pending.deadline = False, now + PATIENCE_SECONDS
        if not self._begin(pending, wanted, first, ticket) and not self.arrivals.is_reading(pending):
            self.counters.fallbacks += bool(wanted) and not (
                self._fits(ticket) and 0 < len(ticket.page_hashes) <= first
            )
            return False
        self.arrivals.held.add(serial)
        return True

    def announced(self, ticket: HandoffTicket, pages: list[PageName], cached: int) -> None:
        """Reads missing pages for a request that will probably come.

        Args:
            ticket: For some of its prompt's pages.
            pages: All of the prompt's; empty if an earlier call for the same transfer had them.
            cached: How many of them the first tier has, as far as it was asked.
        """
        prompt, now = self._announced.get(ticket.transfer_id), self._clock()
        if prompt is None and pages:
            prompt = self._announced[ticket.transfer_id] = _Prompt(next(self._serials), pages, cached)
            self.arrivals.add(prompt.serial, _PendingRead([], now, now, early=True))
        if prompt is not None:
            pending = self.arrivals[prompt.serial]
            pending.deadline = now + NEWS_SECONDS
            first = max(prompt.cached, ticket.first_page)
            self._begin(pending, prompt.pages[first:], first, ticket)

    def lapse(self) -> None:
        """Releases announced pages that no message has named for long."""
        now = self._clock()
        for transfer_id, prompt in tuple(self._announced.items()):
            pending = self.arrivals[prompt.serial]
            if now >= pending.deadline:
                self.arrivals.let_go(pending)
            if now >= pending.deadline + _MEMORY_SECONDS:
                del self._announced[transfer_id]
                self.arrivals.settle(prompt.serial)

    def _begin(self, pending: _PendingRead, wanted: list[PageName], first: int, ticket: HandoffTicket) -> int:
        """Begins to read those pages of ``wanted`` that a ticket names; returns how many pages these are. ``wanted`` are the
        prompt's pages from the ``first`` on."""
        hashes = ticket.page_hashes[first - ticket.first_page :]
        count, most = 0, min(len(wanted), len(hashes)) if self._fits(ticket) else 0
        while count < most and wanted[count].key.hash == hashes[count]:
            count += 1
        wanted = wanted[:count]
        pending.wanted += wanted
        # If another request reads a page already, this request waits for it.
        entries = self.arrivals.reserve(wanted)
        index_of = {name.key.hash: first + index for index, name in enumerate(wanted)}
        each = self._ground.batch
        if pending.early:
            each = max(each, min(-(-len(entries) // self._ground.early_reads), ARRIVING_PAGES))
        for start in range(0, len(entries), each):
            batch = entries[start : start + each]
            self._due.append((pending, ticket, [index_of[entry.key.hash] for entry in batch], batch))
        self._submit()
        return count

    def _fits(self, ticket: HandoffTicket) -> bool:
        """Whether a source's pages fit this worker. Logs once if they do not, because its prompts are then computed twice."""
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
            pending, ticket, indices, batch = self._due.popleft()
            done = partial(self._took, pending, batch)
            self._executor.submit(partial(self._read, pending, ticket, indices, batch), done, urgent=True)

    def poll(self) -> list[int]:
        """Takes the ends of reads; returns the requests that need not wait any longer."""
        self._submit()
        self._executor.poll()
        now = self._clock()
        released = self.arrivals.release(
            lambda pending: now >= pending.deadline or not self.arrivals.is_reading(pending)
        )
        for serial in released:
            wanted = [name.key for name in self.arrivals[serial].wanted]
            self.counters.fallbacks += not self._ground.released(serial, wanted)
        return released

    def wait(self, seconds: float) -> None:
        """Waits until a read has ended, or the given seconds are over."""
        self._executor.wait(seconds)

    def _read(
        self, pending: _PendingRead, ticket: HandoffTicket, indices: list[int], batch: list[HostPage]
    ) -> _Read | None:
        """Reads and checks pages, in a thread of the executor."""
        if pending.cancelled:
            return None
        began = self._clock()
        log_stage("read begins")
        good = self._ground.read(ticket, indices, batch)
        log_stage("read ends")
        return _Read(good, self._clock() - began)

    def _took(self, pending: _PendingRead, batch: list[HostPage], read: _Read | None, error: Exception | None) -> None:
        good = read.good if read is not None else [False] * len(batch)
        arrived = self.arrivals.came(pending, batch, good)
        counters = self.counters
        counters.pages += arrived
        counters.early += arrived if pending.early else 0
        counters.failures += error is not None
        if read is not None:
            counters.stale += len(batch) - arrived
            counters.seconds += read.seconds


# Receives transferred prompts: their pages go to the device, if its room and the backend allow it, or to the
# second tier.
# All pages of a transfer go one way. A transfer whose first pages are in the second tier goes to the second tier.


class TransferReceiver:
    """Reads into the device and into host memory, with shared counters. Single-threaded except for the reads of their shared
    executor.

    Args:
        host: Reads into the second tier.
        receive_buffer: The device pages that can be filled; None: the device's pages cannot be filled.
        device: Reads into the receive buffer.

    Attributes:
        host: The argument.
        counters: What has happened so far.
        page_bytes: Bytes of a page's content.
    """

    def __init__(
        self, host: PageReads, receive_buffer: ReceiveBuffer | None = None, device: PageReads | None = None
    ) -> None:
        self.host = host
        self._receive_buffer = receive_buffer
        self._device = device
        self._both = (host,) if device is None else (device, host)
        self.counters = host.counters
        self.page_bytes = host.page_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes that came before all layers of their pages were computed."""
        return self.host.part_bytes

    @property
    def busy(self) -> bool:
        """Whether reads are under way."""
        return any(each.busy for each in self._both)

    def start(self, serial: int, prompt: Prompt, cached: int, found: int, ticket: HandoffTicket) -> bool:
        """Reads pages that a new request lacks; returns whether it is to wait until :meth:`poll` names it.

        Args:
            serial: The request.
            prompt: Its prompt.
            cached, found: How many of its pages the device has, and how many of the pages after them the second tier has.
            ticket: Its ticket.
        """
        if (device := self._suited(ticket, prompt.pages, cached, found)) is not None:
            device[0].expect(serial, prompt)
            return device[1].start(serial, prompt.pages[cached:], cached, ticket)
        first = cached + found
        return self.host.start(serial, prompt.pages[first:], first, ticket)

    def announced(self, ticket: HandoffTicket, pages: list[PageName], cached: int, found: int) -> None:
        """Reads missing pages for a request that will probably come.

        Args:
            ticket: For some of its prompt's pages.
            pages: All of the prompt's; empty if an earlier call for the same transfer had them.
            cached, found: As for :meth:`start`, as far as they were looked up.
        """
        device = self._suited(ticket, pages, cached, found)
        (self.host if device is None else device[1]).announced(ticket, pages, cached)

    def announced_pages(self, ticket: HandoffTicket) -> Sequence[PageName]:
        """All pages of an announced prompt; none if no page of it was announced."""
        return next(filter(None, (each.announced_pages(ticket) for each in self._both)), ())

    def settle(self, serial: int) -> tuple[int, float, float] | None:
        """A request has started or ended; returns as :meth:`Arrivals.settle`."""
        if self._receive_buffer is not None:
            self._receive_buffer.forget(serial)
        settled = [each.arrivals.settle(serial) for each in self._both]
        return next(filter(None, settled), None)

    def lapse(self) -> None:
        """Releases announced pages that no message has named for long."""
        for each in self._both:
            each.lapse()

    def poll(self) -> list[int]:
        """Takes the ends of reads; returns the requests that need not wait any longer."""
        return [serial for each in self._both for serial in each.poll()]

    def wait(self, seconds: float) -> None:
        """Waits until a read has ended, or the given seconds are over."""
        self.host.wait(seconds)

    def pins(self) -> dict[int, int]:
        """What :meth:`Arrivals.pins` says of the second tier. For tests."""
        if self._device is not None and self._receive_buffer is not None:
            self._receive_buffer.check(self._device.arrivals.pins())
        return self.host.arrivals.pins()

    def _suited(
        self, ticket: HandoffTicket, pages: list[PageName], cached: int, found: int
    ) -> tuple[ReceiveBuffer, PageReads] | None:
        receive_buffer, device = self._receive_buffer, self._device
        if receive_buffer is None or device is None or self.host.knows(ticket):
            return None
        lacking = len(pages) - cached
        fits = (
            not found
            and 0 < lacking <= min(receive_buffer.room, device.arrivals.room)
            and receive_buffer.reaches(ticket)
        )
        return (receive_buffer, device) if fits or device.knows(ticket) else None
