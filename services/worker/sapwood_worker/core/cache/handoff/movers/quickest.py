"""Shared memory where both workers are on one host, TCP where they are not."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.cache.handoff.movers.shm import NotSharedError, SharedMemoryMover
from sapwood_worker.core.cache.handoff.movers.tcp import TcpMover
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.records.handoff import HandoffTicket

_MOST_KNOWN = 1024


class QuickestMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.mover.PageMover`. Each process that gives tickets is asked once
    whether it shares memory.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._shared, self._tcp = SharedMemoryMover(tls), TcpMover(tls)
        self.parts = self._shared.parts = self._tcp.parts
        self._apart: set[tuple[str, int]] = set()

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        source = ticket.source, ticket.epoch
        if source not in self._apart:
            try:
                return self._shared.read(ticket, indices, buffers)
            except NotSharedError:
                if len(self._apart) >= _MOST_KNOWN:
                    self._apart.clear()
                self._apart.add(source)
        return self._tcp.read(ticket, indices, buffers)
