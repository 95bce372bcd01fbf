"""What a source says of the pages of a read: had, not had, or coming, layer by layer, while it still computes them.

The source first answers for every page of the read: yes, no, or ``LATER`` for one that is coming. Then it says again and again
which bytes of the coming pages are there, until all are; an empty answer says that it is still at it. The bytes follow whenever
some are named (TCP), or the reader takes them out of the source's memory. When the step that computed the pages is known to have
gone well, the source says of each coming page, in order, whether it has it after all, with the header over all of its content.

Where the bytes never pass through a host's memory there is no checksum, and in place of the header stands the proof of the page's
tokens and tenant alone.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

from sapwood_worker.core.cache.handoff.leases import Lease
from sapwood_worker.core.cache.handoff.mover import MoverError, PartCount
from sapwood_worker.core.cache.handoff.source import PageSource
from sapwood_worker.core.cache.handoff.wire import LATER, NO, SILENCE_SECONDS, YES, Wire
from sapwood_worker.core.cache.storage.record import Sealer
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.records.handoff import log_stage

_COUNT, _RANGE = struct.Struct("<I"), struct.Struct("<QQ")
_NAP_SECONDS, _SHORT_NAP_SECONDS = 1e-3, 2e-4
_MOST_RANGES = 1 << 16
COMING = b""
"""Stands for the header of a page that is not here yet, but is being filled."""
_PROOF_BYTES = 32


def send_headers(
    wire: Wire,
    source: PageSource,
    lease: Lease | None,
    indices: Sequence[int],
    *,
    in_parts: bool = False,
    sealed: bool = True,
    still: Callable[[int], bool] = lambda index: True,
) -> None:
    """The source's side of a read whose reader takes the pages out of the source's memory itself.

    It says which pages there are, with their sealed headers (or proofs), and waits until the reader says that it has read them (a
    yes; until then a no now and then). At last it says of each page, first those that were there at once, then those that came,
    whether it still is what the ticket says and passes ``still``.
    """
    had: list[int] = []
    coming: list[int] = []
    for index in indices:
        if in_parts and lease is not None and source.is_coming(lease, index, on_device=not sealed):
            wire.put(LATER)
            coming.append(index)
        elif lease is None or not _comes(wire, source, lease, index, on_device=not sealed):
            wire.put(NO)
        else:
            wire.put(
                YES + (source.header(source.record(lease, index), lease, index) if sealed else lease.keys[index].proof)
            )
            had.append(index)
    if lease is not None and coming:
        had += send_parts(wire, source, lease, coming, content=False, sealed=sealed)
    while not wire.says_yes():
        pass  # it is still reading
    if lease is not None:
        wire.send(b"".join(YES if still(index) and source.ends(lease, index) else NO for index in had))


def receive_headers(wire: Wire, count: int, *, sealed: bool = True) -> list[bytes | None]:
    """The reader's side: for each of so many pages its header (or proof), ``COMING``, or None."""
    headers: list[bytes | None] = []
    size = HEADER_BYTES if sealed else _PROOF_BYTES
    for _ in range(count):
        answer = wire.answer()
        headers.append(COMING if answer == LATER else wire.receive(size) if answer == YES else None)
    return headers


def send_parts(
    wire: Wire, source: PageSource, lease: Lease, coming: Sequence[int], *, content: bool, sealed: bool = True
) -> list[int]:
    """The source's side, once it has answered ``LATER`` for some pages of a read.

    Args:
        wire: The connection.
        source: The pages.
        lease: The lease.
        coming: Which of its pages are coming.
        content: Whether the bytes go over the connection.
        sealed: Whether there is a checksum over them.

    Returns:
        Those that it turned out to have, whose headers it has sent.
    """
    sealers = [
        Sealer(source.record(lease, index), lease.keys[index], source.namespace) for index in (coming if sealed else ())
    ]
    groups, known = source.pool.parts.groups, 0
    while known < len(groups):
        there = _reach(source, lease, coming, known, on_device=not sealed)
        ranges = [each for group in groups[known:there] for each in group]
        wire.send(_COUNT.pack(len(ranges)) + b"".join(_RANGE.pack(*each) for each in ranges))
        for sealer in sealers:
            for start, end in ranges:
                part = sealer.take(start, end)
                if content:
                    wire.send(part)
        known = there
        wire.goes_on()
    had = []
    for place, index in enumerate(coming):
        # The step has ended, or is about to.
        if _comes(wire, source, lease, index, _SHORT_NAP_SECONDS, on_device=not sealed):
            wire.put(YES + (sealers[place].header() if sealed else lease.keys[index].proof))
            had.append(index)
        else:
            wire.put(NO)
    wire.flush()
    log_stage("all pages said")
    return had


def receive_parts(
    wire: Wire,
    pages: int,
    content: int,
    count: PartCount,
    take: Callable[[int, int, int], object],
    *,
    sealed: bool = True,
) -> list[bytes | None]:
    """The reader's side.

    Args:
        wire: The connection.
        pages: How many pages are ``LATER``.
        content: Bytes of a page's content.
        count: Is told of what comes before all layers are computed.
        take: Has a part of a page's content filled: the page's number among them, where in the content it begins and ends.
        sealed: As the source has it.

    Returns:
        For each page its header (or proof), or None.
    """
    left = content
    while left:
        (ranges,) = _COUNT.unpack(wire.receive(_COUNT.size))
        if ranges > _MOST_RANGES:
            raise MoverError("the other side says what cannot be")
        parts = list(_RANGE.iter_unpack(wire.receive(ranges * _RANGE.size)))
        size = sum(end - start for start, end in parts)
        if size > left or any(start > end for start, end in parts):
            raise MoverError("the other side says what cannot be")
        for number in range(pages):
            for part in parts:
                take(number, *part)
        left -= size
        count.add(pages * size if left else 0)
        wire.goes_on()
    return receive_headers(wire, pages, sealed=sealed)


def _comes(
    wire: Wire, source: PageSource, lease: Lease, index: int, nap: float = _NAP_SECONDS, *, on_device: bool
) -> bool:
    """Waits until a page is there or lost, and says now and then that it is coming; whether it is there."""
    while source.is_coming(lease, index, on_device=on_device):
        time.sleep(nap)
        wire.says_wait()
    return source.has(lease, index, on_device=on_device)


def _reach(source: PageSource, lease: Lease, coming: Sequence[int], known: int, *, on_device: bool) -> int:
    """How many groups of layers are in all of these pages, or will not be: more than ``known``, unless that takes long."""
    until = time.monotonic() + SILENCE_SECONDS / 4
    least, looked_at = len(source.pool.parts.groups), None
    for index in coming:
        page, _ = lease.ticket.places[index]
        while (parts := source.pool.parts.of(page)) is None or parts is not looked_at:
            if not source.is_coming(lease, index, on_device=on_device):
                break
            if parts is not None:
                found = parts.beyond(known, until - time.monotonic(), on_device=on_device)
                if found > known:
                    least, looked_at = min(least, found), parts
                    break
            if time.monotonic() >= until:
                return known
            time.sleep(_SHORT_NAP_SECONDS)  # the step has not begun, or its end has not been looked at
    return least
