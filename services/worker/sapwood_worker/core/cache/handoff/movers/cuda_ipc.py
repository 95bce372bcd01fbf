"""Pages out of the source's GPU, within a host: the reader's copy engines take them from there, into its own GPU's pages or into
its host pages.

1. The source says how other processes reach its device pool, and where in it each page lies. That is known of a page that was
   copied to host memory, as long as the device's page has not been given to another (its epoch tells).
2. It says which pages and which layers are there, with their headers, as for shared memory (``answers.py``).
3. The reader copies and says that it is done.
4. The source says for each page whether both, the host's and the device's, still were what they are named for.

Pages that are not on the device, and sources on another machine, without this mover or without a GPU, are read as
``QuickestMover`` reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from sapwood_worker.core.cache.handoff.answers import COMING, receive_headers, receive_parts, send_headers
from sapwood_worker.core.cache.handoff.leases import Lease
from sapwood_worker.core.cache.handoff.mover import MoverError
from sapwood_worker.core.cache.handoff.movers.peers import NotReachedError, Peers
from sapwood_worker.core.cache.handoff.movers.quickest import QuickestMover, Sources
from sapwood_worker.core.cache.handoff.movers.shm import boot_name
from sapwood_worker.core.cache.handoff.source import PageSource
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.core.cache.handoff.wire import YES, Wire, dialled
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.model.pools.peer_pages import OwnPool, PeerPool, Targets, host_targets
from sapwood_worker.records.handoff import HandoffTicket

_WHERE = struct.Struct("<16sI")
"""The boot's name, and how many bytes follow that say what the pool is; 0: there is no such lease. Zeros alone: no pool."""
_PLACE = struct.Struct("<i")
_MOST_BYTES = 1 << 20


class ExportedPages(NamedTuple):
    """A source's device pool.

    Attributes:
        exported: What it is among processes.
        epoch_of: How often a page of it was allocated: that goes up before anything is written there for another.
    """

    exported: bytes
    epoch_of: Callable[[int], int]

    def place(self, lease: Lease, index: int) -> int:
        """The device's page of a ticket's page; -1: none, or no more."""
        if index >= len(lease.keys) or lease.entries[index].device is None:
            return -1
        page, epoch = lease.entries[index].device or (0, 0)
        return page if self.epoch_of(page) == epoch else -1


class CudaIpcMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.landing.DeviceMover`.

    Args:
        tls: Its files; None: plain text. Pages themselves stay within the host.
        pool: This worker's pages on its GPU.
    """

    def __init__(self, tls: PageTls | None, pool: OwnPool) -> None:
        self._tls = tls
        self._pool = pool
        self._otherwise = QuickestMover(tls)
        self.parts = self._otherwise.parts
        self.barrier = pool.mark
        self.fill = pool.fill
        self._peers = Peers(pool.memory)
        self._apart = Sources()

    def reaches(self, ticket: HandoffTicket) -> bool:
        return ticket not in self._apart

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        def take(number: int, header: bytes) -> bool:
            buffers[number][:HEADER_BYTES] = header
            return True

        def targets(numbers: list[int]) -> Targets:
            return host_targets([buffers[number][HEADER_BYTES:] for number in numbers])

        unread: list[bool | None] = [None] * len(indices)
        answers = self._read(ticket, "cuda", indices, targets, take) if self.reaches(ticket) else unread
        left = [number for number, answer in enumerate(answers) if answer is None]
        if left:
            others = [buffers[number] for number in left]
            found = self._otherwise.read(ticket, [indices[number] for number in left], others)
            for number, there in zip(left, found, strict=True):
                answers[number] = there
        return list(map(bool, answers))

    def read_to_device(
        self, ticket: HandoffTicket, indices: Sequence[int], pages: Sequence[int], proofs: Sequence[bytes]
    ) -> list[bool | None]:
        def targets(numbers: list[int]) -> Targets:
            return self._pool.targets([pages[number] for number in numbers])

        return self._read(ticket, "device", indices, targets, lambda number, proof: proof == proofs[number])

    def _read(
        self,
        ticket: HandoffTicket,
        way: Literal["cuda", "device"],
        indices: Sequence[int],
        targets: Callable[[list[int]], Targets],
        take: Callable[[int, bytes], bool],
    ) -> list[bool | None]:
        """Reads to ``targets`` of the pages with some numbers; ``take`` looks at a page's header or proof and says whether it is
        good. Returns whether each page was had; None: it is not in the source's GPU."""
        with dialled(ticket, way, indices, self._tls) as wire:
            name, length = _WHERE.unpack(wire.receive(_WHERE.size))
            if name != boot_name() or length > _MOST_BYTES:
                self._apart.add(ticket)
            elif length:
                try:
                    with self._peers.reading(wire.receive(length)) as peer:
                        return self._read_from(peer, wire, len(indices), targets, take, sealed=way == "cuda")
                except NotReachedError:
                    self._apart.add(ticket)
        return [None] * len(indices)

    def _read_from(
        self,
        peer: PeerPool,
        wire: Wire,
        count: int,
        targets: Callable[[list[int]], Targets],
        take: Callable[[int, bytes], bool],
        *,
        sealed: bool,
    ) -> list[bool | None]:
        """The rest of a read of so many pages."""
        places = [place for (place,) in _PLACE.iter_unpack(wire.receive(_PLACE.size * count))]
        there = [number for number, place in enumerate(places) if place >= 0]
        headers = dict(zip(there, receive_headers(wire, len(there), sealed=sealed), strict=True))

        def read(numbers: list[int], start: int, end: int) -> None:
            try:
                peer.read([places[number] for number in numbers], targets(numbers), start, end)
            except (RuntimeError, KeyError) as error:
                raise MoverError(str(error)) from error

        had = [number for number, header in headers.items() if header]
        if had:
            read(had, 0, self._pool.page_bytes)
        coming = [number for number, header in headers.items() if header == COMING]
        if coming:

            def read_part(place: int, start: int, end: int) -> None:
                if not place:  # all pages at once
                    read(coming, start, end)

            size = self._pool.page_bytes
            came = receive_parts(wire, len(coming), size, self.parts, read_part, sealed=sealed)
            headers.update(zip(coming, came, strict=True))
            had += [number for number in coming if headers[number]]
        wire.send(YES)
        answers: list[bool | None] = [None if place < 0 else False for place in places]
        for number in had:
            answers[number] = wire.says_yes() and take(number, headers[number] or b"")
        return answers


def send_where(
    wire: Wire,
    source: PageSource,
    device: ExportedPages | None,
    lease: Lease | None,
    asked: Sequence[int],
    *,
    sealed: bool,
) -> None:
    """The source's side; ``sealed``: with checksums, for a reader whose host pages are read into."""
    if device is None or not device.exported:
        wire.send(_WHERE.pack(bytes(16), 0))
        return
    if lease is None:
        wire.send(_WHERE.pack(boot_name(), 0))
        return
    places = [device.place(lease, index) for index in asked]
    wire.send(_WHERE.pack(boot_name(), len(device.exported)) + device.exported + b"".join(map(_PLACE.pack, places)))
    there = {index: place for index, place in zip(asked, places, strict=True) if place >= 0}
    send_headers(
        wire,
        source,
        lease,
        list(there),
        in_parts=True,
        sealed=sealed,
        still=lambda index: device.place(lease, index) == there[index],
    )
