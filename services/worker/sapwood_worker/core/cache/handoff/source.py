"""What a source of pages answers from: its ledger and its host pages."""

from __future__ import annotations

from typing import NamedTuple

from sapwood_worker.core.cache.handoff.leases import HandoffLeases, Lease
from sapwood_worker.core.cache.storage.record import header_of
from sapwood_worker.model.pools.host_pool import HostPool


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

    def has(self, lease: Lease, index: int, *, on_device: bool = False) -> bool:
        """Whether all of a ticket's page is there: in the host's memory, or on the device if it is read from there."""
        return self._readable(lease, index) and self._filled(lease, index, on_device)

    def is_coming(self, lease: Lease, index: int, *, on_device: bool = False) -> bool:
        """Whether a ticket's page is being computed, or its step's result is not known yet, or it is on its way to where it is
        read."""
        return self._readable(lease, index) and not self._filled(lease, index, on_device)

    def record(self, lease: Lease, index: int) -> memoryview:
        """The record of a ticket's page."""
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

    def _filled(self, lease: Lease, index: int, on_device: bool) -> bool:
        entry = lease.entries[index]
        return entry.ready or (on_device and entry.computed)

    def _readable(self, lease: Lease, index: int) -> bool:
        return index < len(lease.keys) and self.leases.readable(lease, index)
