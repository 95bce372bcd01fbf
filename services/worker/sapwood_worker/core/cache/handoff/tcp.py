"""Pages over the connection itself. Always there.

The source answers, page by page, a byte that says whether it has the page; if so the sealed record follows, and a byte that says
whether the page still was what the ticket says after all of it had been sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.cache.handoff.leases import Lease
from sapwood_worker.core.cache.handoff.source import PageSource
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.core.cache.handoff.wire import NO, YES, Wire, dialled
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.records.handoff import HandoffTicket


class TcpMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.mover.PageMover` by asking for all bytes.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._tls = tls

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        with dialled(ticket, "tcp", indices, self._tls) as wire:
            return [_receive_page(wire, buffer) for buffer in buffers]


def send_pages(wire: Wire, source: PageSource, lease: Lease | None, indices: Sequence[int]) -> None:
    """The source's side."""
    for index in indices:
        record = source.find(lease, index)
        if lease is None or record is None:
            wire.send(NO)
            continue
        wire.send(YES + source.header(record, lease, index))
        wire.send(record[HEADER_BYTES:])
        wire.send(YES if source.ends(lease, index) else NO)


def _receive_page(wire: Wire, buffer: memoryview) -> bool:
    if not wire.says_yes():
        return False
    wire.fill(buffer)
    return wire.says_yes()
