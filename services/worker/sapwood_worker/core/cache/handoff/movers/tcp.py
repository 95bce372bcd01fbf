"""Pages over the connection itself. Always there.

Page by page the source says whether it has the page. If so the sealed record follows, and at last whether the page still was what
the ticket says when all of it had been sent. Pages that are coming follow in parts (``answers.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.cache.handoff.answers import receive_parts, send_parts
from sapwood_worker.core.cache.handoff.leases import Lease
from sapwood_worker.core.cache.handoff.mover import PartCount
from sapwood_worker.core.cache.handoff.source import PageSource
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.core.cache.handoff.wire import LATER, NO, YES, Wire, dialled
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.records.handoff import HandoffTicket


class TcpMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.mover.PageMover` by asking for all bytes.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._tls = tls
        self.parts = PartCount()

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        with dialled(ticket, "tcp", indices, self._tls) as wire:
            answers = [_receive_page(wire, buffer) for buffer in buffers]
            later = [buffer for answer, buffer in zip(answers, buffers, strict=True) if answer is None]
            if not later:
                return list(map(bool, answers))

            def take(number: int, start: int, end: int) -> None:
                wire.fill(later[number][HEADER_BYTES:][start:end])

            headers = receive_parts(wire, len(later), len(later[0]) - HEADER_BYTES, self.parts, take)
            for header, buffer in zip(headers, later, strict=True):
                buffer[:HEADER_BYTES] = header or bytes(HEADER_BYTES)
            came = iter([header is not None and wire.says_yes() for header in headers])
            return [next(came) if answer is None else answer for answer in answers]


def send_pages(wire: Wire, source: PageSource, lease: Lease | None, indices: Sequence[int]) -> None:
    """The source's side."""
    coming: list[int] = []
    for index in indices:
        if lease is not None and source.is_coming(lease, index):
            wire.send(LATER)
            coming.append(index)
            continue
        if lease is None or not source.has(lease, index):
            wire.send(NO)
            continue
        record = source.record(lease, index)
        wire.send(YES + source.header(record, lease, index))
        wire.send(record[HEADER_BYTES:])
        wire.send(YES if source.ends(lease, index) else NO)
    if lease is not None and coming:
        for index in send_parts(wire, source, lease, coming, content=True):
            wire.send(YES if source.ends(lease, index) else NO)


def _receive_page(wire: Wire, buffer: memoryview) -> bool | None:
    """Whether a page was had; None: it comes in parts."""
    answer = wire.answer()
    if answer != YES:
        return None if answer == LATER else False
    wire.fill(buffer)
    return wire.says_yes()
