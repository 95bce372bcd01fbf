"""The source's side of KV transfers: which prompts are offered, and which pages are kept for how long.

States of a transfer::

    OFFERED --a page in host memory,-> ANNOUNCED --computed, and all pages there--> LEASED --all were read--> READ
       |                                 |  ^more pages, renewed^                     |  ^renewed^              |  ^renewed^
       '--aborted--> (gone)              '--aborted, late--> (gone)                   '--released, late, or-----'----> (gone)
                                                                                           aborted

A prompt is offered with its first chunk, and its pages are announced as they are computed, so that they are read while the rest
is computed. Pages of a long chunk are announced when it begins, so that they are read layer by layer (``wire.py``). A prompt of
one short chunk goes from OFFERED to LEASED. An announced lease that is not renewed ends like any other; the next pages begin a
new lease.

A lease pins its pages, so that nothing evicts them. Pins are bounded: where pages find no room, leases whose pages have all been
read give theirs back, oldest first. Such pages stay readable until the room is needed; a page's epoch shows whether it still has
its content.

The router, which passed a lease's ticket on, renews the lease while the request may still need it; else it ends ``lease_seconds``
later. Everything is single-threaded except :meth:`TransferLeases.readable`: the threads that serve reads call it before and
after they read a page.

Complexity: O(pages) an offer, O(leases) a poll, O(offers) the tickets.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from sapwood_worker.core.cache.host import HostPage, HostPages, count_pins
from sapwood_worker.core.cache.page_key import PageChain, PageKey
from sapwood_worker.core.cache.storage.record import header_of
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.handoff import HandoffTicket

LEASE_SECONDS = 1.5
"""An idle scheduler looks at leases every half second, so that pages are free within two seconds of the last renewal."""
_OFFER_SECONDS = 1.0
"""Copies to host memory take milliseconds; an offer that has waited this long for a copy is sent without the page."""


@dataclass(slots=True)
class LeaseCounters:
    """What has happened since the start.

    Attributes:
        tickets: Tickets given.
        pages: Pages they named.
        renewals: How many leases were renewed.
        expired: Leases that ended because nobody renewed them.
        unpinned: Leases whose pins were taken for another lease.
    """

    tickets: int = 0
    pages: int = 0
    renewals: int = 0
    expired: int = 0
    unpinned: int = 0


@dataclass(slots=True)
class _Offer:
    """A prompt whose pages are being computed or copied to the host; ``until``: after it is computed, when to stop waiting for
    copies."""

    keys: list[PageKey]
    until: float | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """A ticket that was given.

    Attributes:
        serial: The request.
        ticket: The ticket, of all pages so far.
        keys: Its pages' keys.
        until: When it ends, unless it is renewed.
        entries: Its host pages. They are in place when they are ready, and lost when their epoch has changed.
        pinned: Those of them that are pinned.
        unread: Places in the ticket that were not read yet. Reading threads take from it.
    """

    serial: int
    ticket: HandoffTicket
    keys: list[PageKey]
    until: float
    entries: list[HostPage]
    pinned: list[HostPage]
    unread: set[int] = field(default_factory=set)


class TransferLeases:
    """The ledger of a worker that offers KV transfers.

    Args:
        host: The second tier, in which pages are kept.
        page_size: Tokens in a page.
        fingerprint: A hash of everything besides tokens that pages depend on.
        epoch: This process's epoch.
        source: The address for reading pages, as tickets name it.
        share: The most of the host pages that leases pin.
        clock: Seconds, monotonic.
        lease_seconds: How long a lease lasts.
        in_parts: If a step computes at least this many pages of a prompt, they are announced when the step is planned, and are
            read layer by layer; 0: never.

    Attributes:
        counters: What has happened so far.
        epoch, in_parts: The arguments.
    """

    def __init__(
        self,
        host: HostPages,
        page_size: int,
        fingerprint: bytes,
        epoch: int,
        source: str,
        share: float,
        clock: Callable[[], float],
        lease_seconds: float = LEASE_SECONDS,
        *,
        in_parts: int = 0,
    ) -> None:
        self.in_parts = in_parts
        self.counters = LeaseCounters()
        self.epoch = epoch
        self._host = host
        self._page_size = page_size
        self._fingerprint = fingerprint
        self._source = source
        self._limit = int(share * host.num_pages)
        self._clock = clock
        self._seconds = lease_seconds
        self._offers: dict[int, _Offer] = {}
        self._leases: dict[bytes, Lease] = {}
        self._by_serial: dict[int, Lease] = {}

    @property
    def offering(self) -> bool:
        """Whether a computed offer still waits for its pages."""
        return any(offer.until is not None for offer in self._offers.values())

    @property
    def num_pinned(self) -> int:
        """How many pages leases pin; a page counts once for each lease that pins it."""
        return sum(len(lease.pinned) for lease in self._leases.values())

    @property
    def num_leases(self) -> int:
        """Tickets that are good now."""
        return len(self._leases)

    def offer(self, serial: int, prompt: array[int], namespace: bytes) -> None:
        """Offers the whole pages of a prompt that is being computed; :meth:`poll` announces them as they are computed. May be
        repeated.

        Args:
            serial: The request.
            prompt: Its tokens.
            namespace: The cache namespace that it is computed in.
        """
        if serial not in self._offers:
            chain = PageChain(namespace, self._page_size)
            chain.extend(prompt, len(prompt))
            self.offer_pages(serial, chain.keys)

    def offer_pages(self, serial: int, keys: list[PageKey]) -> None:
        """Does what :meth:`offer` does, for a caller that knows the keys of the pages."""
        if serial not in self._offers:
            self._offers[serial] = _Offer(keys)

    def computed(self, serial: int) -> None:
        """Notes that an offered prompt has been wholly computed; :meth:`poll` returns its ticket."""
        self._offers[serial].until = self._clock() + _OFFER_SECONDS

    def withdraw(self, serial: int) -> None:
        """Withdraws an offer that has not been computed, because its request has ended."""
        if (offer := self._offers.get(serial)) is not None and offer.until is None:
            self.cancel(serial)

    def cancel(self, serial: int) -> bool:
        """Withdraws an offer, because its request was aborted; returns true if it had no ticket yet.

        If the ticket is already on its way, it will not reach anybody, so its lease ends too.
        """
        if (lease := self._by_serial.get(serial)) is not None:
            self._end(lease)
        return self._offers.pop(serial, None) is not None

    def poll(self) -> list[tuple[int, HandoffTicket, bool]]:
        """Ends the leases whose time is over, and returns what :meth:`tickets` returns. Call it after all received renewals were
        taken."""
        now = self._clock()
        for lease in [each for each in self._leases.values() if each.until <= now]:
            self.counters.expired += 1
            self._end(lease)
        return self.tickets()

    def tickets(self) -> list[tuple[int, HandoffTicket, bool]]:
        """The new tickets and announcements.

        Returns:
            Requests, tickets, and whether each ticket is complete. A complete ticket names all pages, and no other follows. Any
            other ticket names the pages since the last one.
        """
        now = self._clock()
        given = []
        for serial, offer in tuple(self._offers.items()):
            known = len(self._by_serial[serial].keys) if serial in self._by_serial else 0
            found = self._host.expected(islice(offer.keys, known, None))
            end = known + len(found)
            if offer.until is None:
                kept = found[: self._room(len(found))] if found else []
                if kept:
                    given.append((serial, _since(self._extend(serial, kept, now).ticket, known), False))
            elif end == len(offer.keys) or not self._host.has(offer.keys[end]) or now >= offer.until:
                del self._offers[serial]
                self.counters.tickets += 1
                given.append((serial, self._extend(serial, found[: self._room(len(found))], now).ticket, True))
        return given

    def renew(self, transfer_ids: Iterable[bytes]) -> None:
        """Renews leases; ended leases stay ended."""
        until = self._clock() + self._seconds
        for transfer_id in transfer_ids:
            if (lease := self._leases.get(transfer_id)) is not None:
                lease.until = until
                self.counters.renewals += 1

    def release(self, transfer_ids: Iterable[bytes]) -> None:
        """Ends leases that nobody needs any more."""
        for transfer_id in transfer_ids:
            if (lease := self._leases.get(transfer_id)) is not None:
                self._end(lease)

    def lost(self, entries: Iterable[HostPage]) -> list[bytes]:
        """Ends the leases of pages whose content will not arrive; returns their transfer ids."""
        gone = set(map(id, entries))
        ended = [
            lease
            for lease in self._leases.values()
            if any(id(entry) in gone for entry in lease.entries if not entry.ready)
        ]
        for lease in ended:
            self._end(lease)
        return [lease.ticket.transfer_id for lease in ended]

    def find(self, transfer_id: bytes, epoch: int) -> Lease | None:
        """The lease of a ticket, if it is good now. May be called from any thread."""
        return self._leases.get(transfer_id) if epoch == self.epoch else None

    def readable(self, lease: Lease, index: int) -> bool:
        """Whether the ``index``-th page of a ticket still has the ticket's content. A read is good only if this is true before
        and after it. May be called from any thread: a page's epoch rises before the page is written for a new owner."""
        page, epoch = lease.ticket.places[index]
        return self._leases.get(lease.ticket.transfer_id) is lease and self._host.epoch_of(page) == epoch

    def was_read(self, lease: Lease, index: int) -> None:
        """Notes that a reader has the ``index``-th page of a ticket. May be called from any thread."""
        lease.unread.discard(index)

    def pins(self) -> dict[int, int]:
        """How often each host page is pinned. For tests."""
        return count_pins(lease.pinned for lease in self._leases.values())

    def _room(self, wanted: int) -> int:
        """How many more pages may be pinned; leases whose pages have all been read end, until there is room for the wanted
        number."""
        pinned = self.num_pinned
        for lease in self._leases.values():  # the oldest first
            if pinned + wanted <= self._limit:
                break
            if lease.pinned and not lease.unread:
                pinned -= len(lease.pinned)
                self._unpin(lease)
                self.counters.unpinned += 1
        return max(0, self._limit - pinned)

    def _extend(self, serial: int, kept: list[HostPage], now: float) -> Lease:
        """Adds a prompt's next pages to its lease, and renews the lease."""
        lease = self._by_serial.get(serial)
        if lease is None:
            transfer_id = secrets.token_bytes(16)
            milliseconds = round(self._seconds * 1000)
            ticket = HandoffTicket(transfer_id, self._source, self.epoch, self._fingerprint, [], [], milliseconds)
            lease = self._leases[transfer_id] = self._by_serial[serial] = Lease(serial, ticket, [], now, [], [])
        lease.until = now + self._seconds
        self._host.touch(kept)
        self._host.pin(kept)
        lease.pinned += kept
        lease.entries += kept
        lease.unread.update(range(len(lease.keys), len(lease.keys) + len(kept)))
        lease.ticket.page_hashes.extend(entry.key.hash for entry in kept)
        lease.ticket.places.extend((entry.page, self._host.epoch_of(entry.page)) for entry in kept)
        lease.keys += [entry.key for entry in kept]  # last, because other threads then read the fields set above
        self.counters.pages += len(kept)
        return lease

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.ticket.transfer_id], self._by_serial[lease.serial]
        self._unpin(lease)

    def _unpin(self, lease: Lease) -> None:
        self._host.unpin(lease.pinned)
        lease.pinned = []


def _since(ticket: HandoffTicket, first: int) -> HandoffTicket:
    """The part of a ticket about the pages from ``first`` on."""
    return replace(ticket, page_hashes=ticket.page_hashes[first:], places=ticket.places[first:], first_page=first)


# A source of pages: its ledger and its host pages.


class PageSource(NamedTuple):
    """The parts of a source. Reader threads call all methods.

    Attributes:
        leases: Which pages may be read.
        pool: Their memory.
        namespace: What their headers call the model.
    """

    leases: TransferLeases
    pool: HostPool
    namespace: str

    def has(self, lease: Lease, index: int, *, on_device: bool = False) -> bool:
        """Whether a ticket's page is wholly there: in host memory, or on the device if it is read from the device."""
        return self._readable(lease, index) and self._filled(lease, index, on_device)

    def is_coming(self, lease: Lease, index: int, *, on_device: bool = False) -> bool:
        """Whether a ticket's page is being computed, or its step's result is not known yet, or it is being copied to where it is
        read."""
        return self._readable(lease, index) and not self._filled(lease, index, on_device)

    def record(self, lease: Lease, index: int) -> memoryview:
        """The record of a ticket's page."""
        return self.pool.packed(lease.ticket.places[index][0])

    def header(self, record: memoryview, lease: Lease, index: int) -> bytes:
        """The header that seals a record's present content."""
        return header_of(record, lease.keys[index], self.namespace)

    def ends(self, lease: Lease, index: int) -> bool:
        """After a page was read: returns whether it still has the ticket's content."""
        still = self.leases.readable(lease, index)
        if still:
            self.leases.was_read(lease, index)
        return still

    def _filled(self, lease: Lease, index: int, on_device: bool) -> bool:
        entry = lease.entries[index]
        return entry.ready or (on_device and entry.computed)

    def _readable(self, lease: Lease, index: int) -> bool:
        return index < len(lease.keys) and self.leases.readable(lease, index)
