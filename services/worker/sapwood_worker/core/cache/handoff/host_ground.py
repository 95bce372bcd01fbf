"""Host pages as the place where pulled pages go: what comes is checked byte by byte, and is a page of the second tier then."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.cache.handoff.mover import PageMover
from sapwood_worker.core.cache.host.host_pages import HostPage, HostPages
from sapwood_worker.core.cache.page_key import PageKey
from sapwood_worker.core.cache.storage.record import take_good
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.handoff import HandoffTicket

_BATCH = 16
"""Few, so that a prompt of 1000 tokens is read by several at once; a connection carries 1 to 2 GB/s."""


class HostGround:
    """Implements :class:`~sapwood_worker.core.cache.handoff.pulls.Ground`.

    Args:
        host: The second tier's pages.
        pool: Their memory.
        fingerprint: What pages hold besides tokens.
        mover: Reads.

    Attributes:
        batch, early_reads: As :class:`~sapwood_worker.core.cache.handoff.pulls.Ground` has it.
        page_bytes: Bytes of a page's content.
        parts: Counts what came of pages before all of their layers were computed.
    """

    batch, early_reads = _BATCH, 4

    def __init__(self, host: HostPages, pool: HostPool, fingerprint: bytes, mover: PageMover) -> None:
        self.page_bytes = pool.object_bytes
        self.parts = mover.parts
        self.num_pages = host.num_pages
        self.reserve, self.written, self.abandon = host.reserve, host.written, host.abandon
        self.pin, self.unpin = host.pin, host.unpin
        self._host = host
        self._pool = pool
        self._namespace = fingerprint.hex()
        self._mover = mover

    def writable(self, entries: Sequence[HostPage]) -> bool:
        """Always: nothing that uses a host page lets go of it before it has ended."""
        return True

    def read(self, ticket: HandoffTicket, indices: Sequence[int], entries: Sequence[HostPage]) -> list[bool]:
        """Reads pages of a ticket; returns which are what it says. Called from several threads."""
        with self._pool.arriving([entry.page for entry in entries]) as records:
            read = self._mover.read(ticket, indices, records)
            return take_good(self._pool, entries, read, records, self._namespace)

    def released(self, serial: int, wanted: Sequence[PageKey]) -> bool:
        """A request waits no longer; returns whether all that it wanted is there."""
        return len(self._host.match(wanted)) == len(wanted)
