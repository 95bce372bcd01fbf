"""The source's side of hand-offs: which prompts are offered, and whose pages are kept for whom until when.

States of a transfer::

    OFFERED --all pages in host memory--> LEASED --all were read--> READ
       |                                    |  ^renewed^              |  ^renewed^
       '--aborted--> (gone)                 '--released, late, or-----'----> (gone)
                                                 aborted

A lease pins its pages, so that nothing evicts them. Pins are bounded: where a new lease finds no room, those that were read give
theirs back, oldest first; their pages then stay readable until somebody else needs the room, which a page's epoch tells.

A lease is renewed by whoever passed its ticket on, while the request may still need it; else it ends ``lease_seconds`` later. All
is single-threaded but :meth:`HandoffLeases.readable`, which the threads that serve reads call before and after they read a page.

Complexity: O(pages) an offer, O(leases) a poll.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sapwood_worker.core.cache.arrivals import count_pins
from sapwood_worker.core.cache.host_pages import HostPage, HostPages
from sapwood_worker.core.cache.page_key import PageChain, PageKey
from sapwood_worker.records.handoff import HandoffTicket

LEASE_SECONDS = 1.5
"""An idle scheduler looks at leases every half second, so that pages are free within two seconds of the last renewal."""
_OFFER_SECONDS = 1.0
"""Copies to the host's memory take milliseconds; an offer that still waits for one after so long goes without."""


@dataclass(slots=True)
class LeaseCounters:
    """What has happened since the start.

    Attributes:
        tickets: Tickets given.
        pages: Pages they named.
        renewals: Leases begun anew.
        expired: Leases that ended because nobody renewed them.
        unpinned: Leases whose pins were taken for another.
    """

    tickets: int = 0
    pages: int = 0
    renewals: int = 0
    expired: int = 0
    unpinned: int = 0


@dataclass(frozen=True, slots=True)
class _Offer:
    """A prompt whose pages are on their way to the host's memory."""

    keys: list[PageKey]
    until: float


@dataclass(slots=True, eq=False)
class Lease:
    """A ticket that was given.

    Attributes:
        serial: The request.
        ticket: The ticket.
        keys: Of its pages.
        until: When it ends, unless it is renewed.
        pinned: Its pages, as far as they are pinned.
        unread: Places in the ticket that were not read yet. Reading threads take from it.
    """

    serial: int
    ticket: HandoffTicket
    keys: list[PageKey]
    until: float
    pinned: list[HostPage]
    unread: set[int] = field(default_factory=set)


class HandoffLeases:
    """The ledger of a worker that hands prompts off.

    Args:
        host: The second tier, in which pages are kept.
        page_size: Tokens in a page.
        fingerprint: What pages hold besides tokens.
        epoch: Of this process.
        source: Where pages are read, as tickets say it.
        share: The most of the host pages that leases pin.
        clock: Seconds, monotonic.
        lease_seconds: How long a lease lasts.

    Attributes:
        counters: What has happened so far.
        epoch: The argument.
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
    ) -> None:
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
        """Whether an offer waits for its pages."""
        return bool(self._offers)

    @property
    def num_pinned(self) -> int:
        """Pages that leases pin; one counts for each lease that pins it."""
        return sum(len(lease.pinned) for lease in self._leases.values())

    @property
    def num_leases(self) -> int:
        """Tickets that are good now."""
        return len(self._leases)

    def offer(self, serial: int, prompt: array[int], namespace: bytes) -> None:
        """Offers the whole pages of a prompt that has been computed; :meth:`poll` answers with the ticket.

        Args:
            serial: The request.
            prompt: Its tokens.
            namespace: That it was computed in.
        """
        chain = PageChain(namespace, self._page_size)
        chain.extend(prompt, len(prompt))
        self._offers[serial] = _Offer(chain.keys, self._clock() + _OFFER_SECONDS)

    def cancel(self, serial: int) -> bool:
        """Takes an offer back, since its request was aborted; returns whether it had no ticket yet.

        An abort that meets the ticket on its way says that the ticket reaches nobody: its lease ends, too.
        """
        if (lease := self._by_serial.get(serial)) is not None:
            self._end(lease)
        return self._offers.pop(serial, None) is not None

    def poll(self) -> list[tuple[int, HandoffTicket]]:
        """Ends the leases whose time is over; returns the tickets of the requests whose pages are there, or will not come."""
        now = self._clock()
        for lease in [each for each in self._leases.values() if each.until <= now]:
            self.counters.expired += 1
            self._end(lease)
        given = []
        for serial, offer in tuple(self._offers.items()):
            found = self._host.match(offer.keys)
            coming = len(found) < len(offer.keys) and self._host.has(offer.keys[len(found)])
            if coming and now < offer.until:
                continue
            del self._offers[serial]
            given.append((serial, self._grant(serial, found, now)))
        return given

    def renew(self, transfer_ids: Iterable[bytes]) -> None:
        """Begins leases anew; what is not leased any more stays so."""
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

    def find(self, transfer_id: bytes, epoch: int) -> Lease | None:
        """The lease of a ticket, if it is good now. May be called from any thread."""
        return self._leases.get(transfer_id) if epoch == self.epoch else None

    def readable(self, lease: Lease, index: int) -> bool:
        """Whether the ``index``-th page of a ticket is what the ticket says. What was read is good only if this is still so
        afterwards. May be called from any thread: a page's epoch goes up before anything is written to it for another."""
        page, epoch = lease.ticket.places[index]
        return self._leases.get(lease.ticket.transfer_id) is lease and self._host.epoch_of(page) == epoch

    def was_read(self, lease: Lease, index: int) -> None:
        """Notes that somebody has the ``index``-th page of a ticket. May be called from any thread."""
        lease.unread.discard(index)

    def pins(self) -> dict[int, int]:
        """How often each host page is pinned. For tests."""
        return count_pins(lease.pinned for lease in self._leases.values())

    def _grant(self, serial: int, found: list[HostPage], now: float) -> HandoffTicket:
        pinned = self.num_pinned
        for lease in self._leases.values():  # the oldest first
            if pinned + len(found) <= self._limit:
                break
            if lease.pinned and not lease.unread:
                pinned -= len(lease.pinned)
                self._unpin(lease)
                self.counters.unpinned += 1
        kept = found[: max(0, self._limit - pinned)]
        ticket = HandoffTicket(
            transfer_id=secrets.token_bytes(16),
            source=self._source,
            epoch=self.epoch,
            fingerprint=self._fingerprint,
            page_hashes=[entry.key.hash for entry in kept],
            places=[(entry.page, self._host.epoch_of(entry.page)) for entry in kept],
            lease_ms=round(self._seconds * 1000),
        )
        self._host.touch(kept)
        self._host.pin(kept)
        keys = [entry.key for entry in kept]
        lease = Lease(serial, ticket, keys, now + self._seconds, kept, set(range(len(kept))))
        self._leases[ticket.transfer_id] = self._by_serial[serial] = lease
        self.counters.tickets += 1
        self.counters.pages += len(kept)
        return ticket

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.ticket.transfer_id], self._by_serial[lease.serial]
        self._unpin(lease)

    def _unpin(self, lease: Lease) -> None:
        self._host.unpin(lease.pinned)
        lease.pinned = []
