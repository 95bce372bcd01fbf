"""Pages by way of memory that two workers of one host share: no byte of them goes through a socket.

The source's host pages lie, unless they are in parts of ranks, in a file without a name (``model/pools/shared_memory.py``). It
answers with where that is, and with a byte for each page that says whether it has it, followed by the sealed header if so. The
reader opens the file through ``/proc``, which the kernel lets only processes of the same user do, makes sure that it is that file
of this boot of this machine, reads the pages out of it, and says that it is done; then the source says for each page that it had
whether it still was what the ticket says. A file that cannot be opened is another machine's, container's or user's.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from sapwood_worker.core.cache.handoff.leases import Lease
from sapwood_worker.core.cache.handoff.mover import MoverError
from sapwood_worker.core.cache.handoff.source import PageSource, receive_headers, send_headers
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.core.cache.handoff.wire import YES, Wire, dialled
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, record_bytes
from sapwood_worker.records.handoff import HandoffTicket

_WHERE = struct.Struct("<16sQQ64s")
"""The boot's name, the file's device and inode, its path; zeros: there is none."""


class NotSharedError(MoverError):
    """The source's memory cannot be reached from here, now or ever."""


class SharedMemoryMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.mover.PageMover` within a host.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._tls = tls

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        with dialled(ticket, "shm", indices, self._tls) as wire, _opened(wire.receive(_WHERE.size)) as memory:
            headers = receive_headers(wire, indices)
            whole = [
                header is not None and _copy(memory, header, ticket.places[index - ticket.first_page][0], buffer)
                for header, index, buffer in zip(headers, indices, buffers, strict=True)
            ]
            wire.send(YES)
            return [
                header is not None and wire.says_yes() and copied for header, copied in zip(headers, whole, strict=True)
            ]


def send_where(wire: Wire, source: PageSource, lease: Lease | None, indices: Sequence[int]) -> None:
    """The source's side."""
    memory = source.pool.shared
    if memory is None:
        wire.send(bytes(_WHERE.size))
        return
    device, inode = memory.identity
    wire.send(_WHERE.pack(_boot(), device, inode, memory.path.encode()))
    send_headers(wire, source, lease, indices)


def _copy(memory: int, header: bytes, page: int, buffer: memoryview) -> bool:
    """Makes a record of a page in an open file; returns whether all of it was there."""
    buffer[:HEADER_BYTES] = header
    content = buffer[HEADER_BYTES:]
    at = page * record_bytes(len(content)) + HEADER_BYTES
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
    if boot != _boot() or not any(boot):
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
def _boot() -> bytes:
    """Names this boot of this machine; zeros: the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return bytes(16)
