"""Reads pages from the GPU of another process on the same host.

GPU memory that another process has open is not freed when its owner ends, so the owner's successor would find too little. So a
reader closes each pool when the pool's process has ended and no read is under way.
"""

from __future__ import annotations

import contextlib
import select
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from sapwood_worker.core.cache.transfer.leases import Lease, PageSource
from sapwood_worker.core.cache.transfer.tcp import SameHostBackend, Sources, boot_name
from sapwood_worker.core.cache.transfer.transfer_backend import TransferError
from sapwood_worker.core.cache.transfer.wire import (
    COMING,
    YES,
    PageTls,
    Wire,
    dialled,
    receive_headers,
    receive_parts,
    send_headers,
)
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.model.pools.peer_pages import DeviceMemory, OwnPool, PeerPool, Targets, host_targets
from sapwood_worker.records.handoff import HandoffTicket

_MOST_KNOWN = 64


class NotReachedError(Exception):
    """A pool cannot be read from here, now or ever."""


@dataclass(slots=True)
class _Peer:
    pool: PeerPool
    readers: int = 0
    over: bool = False


class Peers:
    """Opens each pool once. For any thread.

    Args:
        memory: Opens them.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._peers: dict[bytes, _Peer | None] = {}
        """For each exported pool's name among processes, the pool opened here; None: it could not be opened."""

    @contextlib.contextmanager
    def reading(self, exported: bytes) -> Iterator[PeerPool]:
        """Opens a pool, which stays open within the block.

        Args:
            exported: What :meth:`~sapwood_worker.model.pools.peer_pages.OwnPool.export` gave.

        Raises:
            NotReachedError: It cannot be opened.
        """
        with self._lock:
            if exported not in self._peers:
                self._peers[exported] = self._opened(exported)
            peer = self._peers[exported]
            if peer is None:
                raise NotReachedError
            peer.readers += 1
        try:
            yield peer.pool
        finally:
            with self._lock:
                peer.readers -= 1
                self._close_if_over(peer)

    def _opened(self, exported: bytes) -> _Peer | None:
        if len(self._peers) >= _MOST_KNOWN:
            self._peers = {known: peer for known, peer in self._peers.items() if peer is not None}
        try:
            peer = _Peer(PeerPool(exported, self._memory))
        except (OSError, RuntimeError, msgspec.DecodeError):
            return None
        threading.Thread(target=self._watch, args=(exported, peer), name="peer", daemon=True).start()
        return peer

    def _watch(self, exported: bytes, peer: _Peer) -> None:
        """Waits until a pool's process has ended."""
        ended = select.poll()
        ended.register(peer.pool.process, select.POLLIN)
        ended.poll()
        with self._lock:
            del self._peers[exported]
            peer.over = True
            self._close_if_over(peer)

    def _close_if_over(self, peer: _Peer) -> None:
        if peer.over and not peer.readers:
            with contextlib.suppress(RuntimeError):  # the driver has seen it end, too
                peer.pool.close()


# Pages from the source's GPU, within a host: the reader's copy engines copy them from there into its own GPU's pages or into
# its host pages.
# 1. The source says how other processes reach its device pool, and where in it each page lies. The place of a page copied to
# host memory is known as long as the device page has no new owner (its epoch shows this).
# 2. It says which pages and which layers are there, with their headers, as for shared memory (``wire.py``).
# 3. The reader copies and says that it is done.
# 4. The source says for each page whether the host page and the device page both still had their named content.
#
# Pages that are not on the device, and sources on another machine, without this backend or without a GPU, are read as
# ``SameHostBackend`` reads them.


_WHERE = struct.Struct("<16sI")
"""The boot's name, and the length of the pool's description that follows; 0: there is no such lease. All zeros: no pool."""
_PLACE = struct.Struct("<i")
_MOST_BYTES = 1 << 20


class ExportedPages(NamedTuple):
    """A source's device pool.

    Attributes:
        exported: The pool's name among processes.
        epoch_of: How often a page of the pool was allocated: the number rises before the page is written for a new owner.
    """

    exported: bytes
    epoch_of: Callable[[int], int]

    def place(self, lease: Lease, index: int) -> int:
        """The device page of a ticket's page; -1: there is none (any more)."""
        if index >= len(lease.keys) or lease.entries[index].device is None:
            return -1
        page, epoch = lease.entries[index].device or (0, 0)
        return page if self.epoch_of(page) == epoch else -1


class CudaIpcBackend:
    """Implements :class:`~sapwood_worker.core.cache.transfer.reads.DeviceTransferBackend`.

    Args:
        tls: Its files; None: plain text. Pages themselves stay within the host.
        pool: This worker's pages on its GPU.
    """

    def __init__(self, tls: PageTls | None, pool: OwnPool) -> None:
        self._tls = tls
        self._pool = pool
        self._otherwise = SameHostBackend(tls)
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
        """Reads the ticket's pages ``indices`` into ``targets``; ``take`` checks a page's header or proof. Returns for each page
        whether it was read; None: it is not in the source's GPU."""
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
        """The remaining steps of a read of this many pages."""
        places = [place for (place,) in _PLACE.iter_unpack(wire.receive(_PLACE.size * count))]
        there = [number for number, place in enumerate(places) if place >= 0]
        headers = dict(zip(there, receive_headers(wire, len(there), sealed=sealed), strict=True))

        def read(numbers: list[int], start: int, end: int) -> None:
            try:
                peer.read([places[number] for number in numbers], targets(numbers), start, end)
            except (RuntimeError, KeyError) as error:
                raise TransferError(str(error)) from error

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
    """The source's side; ``sealed``: with checksums, for a reader that reads into host pages."""
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
