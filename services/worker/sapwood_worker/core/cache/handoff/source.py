"""What a source of pages answers from: its ledger and its host pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sapwood_worker.core.cache.handoff.leases import HandoffLeases, Lease
from sapwood_worker.core.cache.handoff.wire import NO, YES, Wire
from sapwood_worker.core.cache.storage.record import header_of
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool


class PageSource(NamedTuple):
    """Its parts. All is called from threads of their own.

    Attributes:
        leases: Which pages may be read.
        pool: Their memory.
        namespace: What their headers call the model.
    """

    leases: HandoffLeases
    pool: HostPool
    namespace: str

    def find(self, lease: Lease | None, index: int) -> memoryview | None:
        """The record of a ticket's page; None: it is not had, or not any more."""
        if lease is None or index >= len(lease.keys) or not self.leases.readable(lease, index):
            return None
        return self.pool.packed(lease.ticket.places[index][0])

    def header(self, record: memoryview, lease: Lease, index: int) -> bytes:
        """What seals a record's content as it is now."""
        return header_of(record, lease.keys[index], self.namespace)

    def ends(self, lease: Lease, index: int) -> bool:
        """A page was read: whether it still is what the ticket says."""
        still = self.leases.readable(lease, index)
        if still:
            self.leases.was_read(lease, index)
        return still


def send_headers(wire: Wire, source: PageSource, lease: Lease | None, indices: Sequence[int]) -> None:
    """Of pages that the reader takes out of the source's memory itself: says which there are, with their sealed headers, waits
    until they are read (a yes; a no now and then until then), and says which of them still are what the ticket says."""
    had: list[int] = []
    for index in indices:
        record = source.find(lease, index)
        if lease is None or record is None:
            wire.send(NO)
        else:
            wire.send(YES + source.header(record, lease, index))
            had.append(index)
    while not wire.says_yes():
        pass  # it is still reading
    if lease is not None:
        wire.send(b"".join(YES if source.ends(lease, index) else NO for index in had))


def receive_headers(wire: Wire, indices: Sequence[int]) -> list[bytes | None]:
    """The reader's side: for each page its header, or None."""
    return [wire.receive(HEADER_BYTES) if wire.says_yes() else None for _ in indices]
