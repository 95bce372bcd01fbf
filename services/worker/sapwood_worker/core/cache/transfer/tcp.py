"""Sends pages over the TCP connection itself, or through memory that two workers of one host share."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from sapwood_worker.core.cache.transfer.leases import Lease, PageSource
from sapwood_worker.core.cache.transfer.transfer_backend import PartCount, TransferError
from sapwood_worker.core.cache.transfer.wire import (
    COMING,
    LATER,
    NO,
    YES,
    PageTls,
    Wire,
    dialled,
    receive_headers,
    receive_parts,
    send_headers,
    send_parts,
)
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, record_bytes
from sapwood_worker.records.handoff import HandoffTicket

# Pages over the connection itself. Always there.
# Page by page the source says whether it has the page. If so the sealed record follows, and then whether the page still had
# the ticket's content after it was sent. Pages that are being computed follow in parts (``wire.py``).


class TcpBackend:
    """Implements :class:`~sapwood_worker.core.cache.transfer.transfer_backend.TransferBackend` by asking for all bytes.

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
            wire.put(LATER)
            coming.append(index)
            continue
        if lease is None or not source.has(lease, index):
            wire.put(NO)
            continue
        record = source.record(lease, index)
        wire.send(YES + source.header(record, lease, index))
        wire.send(record[HEADER_BYTES:])
        wire.put(YES if source.ends(lease, index) else NO)
    wire.flush()
    if lease is not None and coming:
        for index in send_parts(wire, source, lease, coming, content=True):
            wire.send(YES if source.ends(lease, index) else NO)


def _receive_page(wire: Wire, buffer: memoryview) -> bool | None:
    """Whether a page was received; None: it comes in parts."""
    answer = wire.answer()
    if answer != YES:
        return None if answer == LATER else False
    wire.fill(buffer)
    return wire.says_yes()


# Pages through memory that two workers of one host share: no byte of a page goes through a socket.
# The source's host pages lie in a file without a name, unless they are split over ranks
# (``model/pools/host_pool.py``).
# 1. The source says where that file is, and for each page whether it has the page, with the sealed header if so.
# 2. The reader opens the file through ``/proc``, which the kernel lets only processes of the same user do. It makes
#   sure that this is the file, of this boot of this machine, reads the pages out of it, and says that it is done. A
#   file that cannot be opened is another machine's, container's or user's.
# 3. The source says for each page that it had whether the page still had the ticket's content.


_WHERE = struct.Struct("<16sQQ64s")
"""The boot's name, the file's device and inode, its path; zeros: there is none."""


class NotSharedError(TransferError):
    """The source's memory cannot be reached from here, now or ever."""


class SharedMemoryBackend:
    """Implements :class:`~sapwood_worker.core.cache.transfer.transfer_backend.TransferBackend` within a host.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._tls = tls
        self.parts = PartCount()

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        with dialled(ticket, "shm", indices, self._tls) as wire, _opened(wire.receive(_WHERE.size)) as memory:
            headers = receive_headers(wire, len(indices))
            copied = [True] * len(headers)

            def copy(number: int, start: int = 0, end: int | None = None) -> None:
                content = buffers[number][HEADER_BYTES:]
                page, _ = ticket.places[indices[number] - ticket.first_page]
                at = page * record_bytes(len(content)) + HEADER_BYTES + start
                copied[number] &= _copy(memory, at, content[start:end])

            had = [number for number, header in enumerate(headers) if header]
            for number in had:
                buffers[number][:HEADER_BYTES] = headers[number] or b""
                copy(number)
            coming = [number for number, header in enumerate(headers) if header == COMING]
            if coming:
                size = len(buffers[0]) - HEADER_BYTES
                came = receive_parts(
                    wire, len(coming), size, self.parts, lambda place, *part: copy(coming[place], *part)
                )
                for number, header in zip(coming, came, strict=True):
                    if header is not None:
                        buffers[number][:HEADER_BYTES] = header
                        had.append(number)
            wire.send(YES)
            good = {number for number in had if wire.says_yes() and copied[number]}
            return [number in good for number in range(len(headers))]


def send_where(wire: Wire, source: PageSource, lease: Lease | None, indices: Sequence[int]) -> None:
    """The source's side."""
    memory = source.pool.shared
    if memory is None:
        wire.send(bytes(_WHERE.size))
        return
    device, inode = memory.identity
    wire.send(_WHERE.pack(boot_name(), device, inode, memory.path.encode()))
    send_headers(wire, source, lease, indices, in_parts=True)


def _copy(memory: int, at: int, content: memoryview) -> bool:
    """Fills memory with what is at a place of an open file; returns whether all of it was there."""
    while content:
        count = os.preadv(memory, [content], at)
        if not count:
            return False
        content, at = content[count:], at + count
    return True


@contextlib.contextmanager
def _opened(where: bytes) -> Iterator[int]:
    """The file that a source has named, open for reading.

    Raises:
        NotSharedError: It cannot be reached from here.
    """
    boot, device, inode, path = _WHERE.unpack(where)
    if boot != boot_name() or not any(boot):
        raise NotSharedError("the other worker shares no memory with this one")
    try:
        memory = os.open(path.rstrip(b"\0"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotSharedError(f"the other worker's memory: {error}") from error
    try:
        found = os.fstat(memory)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise NotSharedError("the other worker's processes are not seen from here")
        yield memory
    finally:
        os.close(memory)


@cache
def boot_name() -> bytes:
    """Names this boot of this machine; zeros: the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return bytes(16)


# Shared memory where both workers are on one host, TCP where they are not.


_MOST_KNOWN = 1024


class Sources:
    """The processes that give tickets; a restarted process counts as another one. When there are many, all are forgotten."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()

    def __contains__(self, ticket: HandoffTicket) -> bool:
        return (ticket.source, ticket.epoch) in self._known

    def add(self, ticket: HandoffTicket) -> None:
        """Returns the process that gave a ticket. Thread-safe."""
        if len(self._known) >= _MOST_KNOWN:
            self._known = set()
        self._known.add((ticket.source, ticket.epoch))


class SameHostBackend:
    """Implements :class:`~sapwood_worker.core.cache.transfer.transfer_backend.TransferBackend`.

    Asks each process that gives tickets once whether it shares memory.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._shared, self._tcp = SharedMemoryBackend(tls), TcpBackend(tls)
        self.parts = self._shared.parts = self._tcp.parts
        self._apart = Sources()

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        if ticket not in self._apart:
            try:
                return self._shared.read(ticket, indices, buffers)
            except NotSharedError:
                self._apart.add(ticket)
        return self._tcp.read(ticket, indices, buffers)
