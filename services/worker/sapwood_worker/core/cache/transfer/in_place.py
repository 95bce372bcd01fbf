"""The protocol of backends whose reader reads the source's memory itself, with a third-party transfer engine.

1. The source sends what the reader's engine needs, the address of its host pages, and for each page whether it has the page,
   with the sealed header if so. Only the holder of a valid ticket gets them, because with them one can read all of the source's
   host pages.
2. The reader's engine reads the pages into its host pages, in place, and the reader says that it is done.
3. The source says for each page that it had whether the page still had the ticket's content.

A transfer is over only when its engine says so: NIXL 1.5 and Mooncake 0.3.13 over TCP still write for reads that were abandoned,
once a stopped source continues. So a read lasts as long as its transfer, its pages stay reserved, and ``Room`` keeps
threads free for other sources. Its request waits no longer than its patience.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.transfer.leases import Lease, PageSource
from sapwood_worker.core.cache.transfer.transfer_backend import TransferError
from sapwood_worker.core.cache.transfer.wire import (
    NO,
    SILENCE_SECONDS,
    YES,
    PageTls,
    Wire,
    receive_headers,
    send_headers,
)
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, record_bytes
from sapwood_worker.records.handoff import HandoffTicket

_WHERE = struct.Struct("<QI")
"""The address of the first host page in the source, and how many bytes for the engine follow."""
_NO_ENGINE, _NO_TICKET = _WHERE.pack(0, 0), _WHERE.pack(2**64 - 1, 0)
_MOST_BYTES = 1 << 20
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3
MOST_AT_A_SOURCE = 6
"""Reads from one source at a time: fewer than ``reads.READS``."""

Piece = tuple[int, int]
"""An address and how many bytes."""


def send_where(
    wire: Wire, source: PageSource, engine: Callable[[], bytes] | None, lease: Lease | None, asked: list[int]
) -> None:
    """The source's side; ``engine`` returns what its reader needs to know."""
    known = b"" if engine is None or not source.pool.in_place else engine()
    if not known:
        wire.send(_NO_ENGINE)
    elif lease is None:
        wire.send(_NO_TICKET)
    else:
        wire.send(_WHERE.pack(source.pool.records.ctypes.data, len(known)) + known)
        send_headers(wire, source, lease, asked)


def read_in_place(
    wire: Wire,
    ticket: HandoffTicket,
    indices: Sequence[int],
    buffers: Sequence[memoryview],
    move: Callable[[bytes, list[Piece], list[Piece]], None],
) -> list[bool]:
    """The reader's side.

    Args:
        wire: A connection on which pages were asked for.
        ticket, indices, buffers: As in :meth:`~sapwood_worker.core.cache.transfer.transfer_backend.TransferBackend.read`.
        move: Takes the source engine's metadata, the pieces of memory to fill here, and those to read there. After it returns,
            or raises TransferError, nothing is written any more.

    Raises:
        TransferError: The source has no such engine, or not all pages were read.
    """
    where = wire.receive(_WHERE.size)
    if where == _NO_TICKET:
        return [False] * len(buffers)
    address, length = _WHERE.unpack(where)
    if not 0 < length <= _MOST_BYTES:
        raise TransferError("the other worker has no such engine, or its pages are not in one piece")
    known = wire.receive(length)
    headers = receive_headers(wire, len(indices))
    here: list[Piece] = []
    there: list[Piece] = []
    for header, index, buffer in zip(headers, indices, buffers, strict=True):
        if header is not None:
            buffer[:HEADER_BYTES] = header
            content = np.frombuffer(buffer, np.uint8)[HEADER_BYTES:]
            page, _ = ticket.places[index - ticket.first_page]
            here.append((content.ctypes.data, len(content)))
            there.append((address + page * record_bytes(len(content)) + HEADER_BYTES, len(content)))
    if here:
        move(known, here, there)
    wire.send(YES)
    return [header is not None and wire.says_yes() for header in headers]


def wait_until_over(wire: Wire, is_over: Callable[[], bool]) -> None:
    """Polls an engine until a transfer is over, and reports now and then that it is still running."""
    nap, said = _SHORTEST_NAP, time.monotonic()
    while not is_over():
        time.sleep(nap)
        nap = min(_LONGEST_NAP, 2 * nap)
        if time.monotonic() > said + SILENCE_SECONDS / 4:
            said = time.monotonic()
            with contextlib.suppress(OSError):  # nobody listens any more: the transfer continues all the same
                wire.send(NO)


class Room:
    """Counts the reads under way from each source. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: dict[bytes, threading.BoundedSemaphore] = {}
        self._reading: dict[bytes, int] = {}

    @contextlib.contextmanager
    def at(self, source: bytes) -> Iterator[None]:
        """A read from a source.

        Raises:
            TransferError: Too many do not end.
        """
        with self._lock:
            room = self._rooms.setdefault(source, threading.BoundedSemaphore(MOST_AT_A_SOURCE))
            self._reading[source] = self._reading.get(source, 0) + 1
        try:
            if not room.acquire(timeout=SILENCE_SECONDS):
                raise TransferError("reads from there do not end")
            try:
                yield
            finally:
                room.release()
        finally:
            with self._lock:
                self._reading[source] -= 1
                if not self._reading[source]:
                    del self._reading[source], self._rooms[source]


def refuse_tls(backend: str, tls: PageTls | None) -> None:
    """Refuses to send pages in plain text if all other traffic is encrypted.

    Raises:
        ConfigError: There are files for TLS.
    """
    if tls is not None:
        raise ConfigError(
            f"--kv-transfer {backend} sends pages in plain text, which is not for a worker with --tls-cert"
        )
