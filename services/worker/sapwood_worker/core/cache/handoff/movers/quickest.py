"""Shared memory where both workers are on one host, TCP where they are not."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.cache.handoff.movers.shm import NotSharedError, SharedMemoryMover
from sapwood_worker.core.cache.handoff.movers.tcp import TcpMover
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.records.handoff import HandoffTicket

_MOST_KNOWN = 1024


class Sources:
    """Processes that give tickets, each start of one apart; when there are many all are forgotten."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()

    def __contains__(self, ticket: HandoffTicket) -> bool:
        return (ticket.source, ticket.epoch) in self._known

    def add(self, ticket: HandoffTicket) -> None:
        """The one that gave a ticket. For any thread."""
        if len(self._known) >= _MOST_KNOWN:
            self._known = set()
        self._known.add((ticket.source, ticket.epoch))


class QuickestMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.mover.PageMover`. Each process that gives tickets is asked once
    whether it shares memory.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._shared, self._tcp = SharedMemoryMover(tls), TcpMover(tls)
        self.parts = self._shared.parts = self._tcp.parts
        self._apart = Sources()

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        if ticket not in self._apart:
            try:
                return self._shared.read(ticket, indices, buffers)
            except NotSharedError:
                self._apart.add(ticket)
        return self._tcp.read(ticket, indices, buffers)
