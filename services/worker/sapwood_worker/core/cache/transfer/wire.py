"""What a reader and a source of pages say to each other, with TLS or without."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from sapwood_worker.core.cache.storage.record import Sealer
from sapwood_worker.core.cache.transfer.leases import Lease, PageSource
from sapwood_worker.core.cache.transfer.transfer_backend import PartCount, TransferError
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.records.handoff import HandoffTicket, log_stage


class PageTls(NamedTuple):
    """Files in PEM, read again for each connection, so that replaced files take effect.

    Attributes:
        cert: The worker's certificate.
        key: Its private key.
        ca: The CAs that signed other workers' certificates. A peer with a certificate that they signed is a worker: names and
            addresses are not compared, and the ticket says which pages a connection may read.
    """

    cert: Path
    key: Path
    ca: Path

    def server(self) -> ssl.SSLContext:
        """The TLS context of the source. Raises OSError (including ssl.SSLError) if the files are missing or broken."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # a session that is resumed is not verified again
        return self._filled(context)

    def client(self) -> ssl.SSLContext:
        """The TLS context of the reader. Raises what :meth:`server` does."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._filled(context)

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context


# The protocol between a reader and a source of pages, for every backend.
# A connection carries one read. The reader sends an :class:`Ask`, and the source's answer depends on its ``way``: the modules
# of this folder each have both sides. A connection that sends anything else, or nothing for ``SILENCE_SECONDS``, is closed.


Way = Literal["tcp", "shm", "nixl", "mooncake", "cuda", "device"]

YES, NO, LATER, WAIT = b"\1", b"\0", b"\2", b"\3"
SILENCE_SECONDS = 1.0
READ_SECONDS = 4.0
"""The longest time of a whole read; the reader waits little longer (``reads.PATIENCE_SECONDS``)."""

_ASK = struct.Struct("<8s16sQI")
_INDEX = struct.Struct("<I")
_MAGIC: dict[Way, bytes] = {
    "tcp": b"SAPWHO02",
    "shm": b"SAPWHM02",
    "nixl": b"SAPWHX02",
    "mooncake": b"SAPWHK02",
    "cuda": b"SAPWHC02",
    "device": b"SAPWHD02",
}
_MOST_PAGES = 4096
_AHEAD_BYTES = 1 << 16


class Ask(NamedTuple):
    """What a reader wants.

    Attributes:
        way: How.
        transfer_id: The ticket's.
        epoch: The epoch of the process that gave it.
        indices: Which of the prompt's pages.
    """

    way: Way
    transfer_id: bytes
    epoch: int
    indices: list[int]


class Wire:
    """One end of a connection. Every call raises OSError if the connection broke, or nothing arrived for too long.

    Args:
        connection: Made by :func:`dialled`, or accepted.
        seconds: The time limit of the whole exchange.
    """

    def __init__(self, connection: socket.socket, seconds: float = READ_SECONDS) -> None:
        self._connection = connection
        self._seconds = seconds
        self._unsent = bytearray()
        self._ahead = bytearray()
        self._said = time.monotonic()
        self.goes_on()

    def goes_on(self) -> None:
        """Restarts the time limit, because the other side may take as long again, or this side does."""
        self._until = time.monotonic() + self._seconds

    def send(self, content: bytes | memoryview) -> None:
        """Says something."""
        self.flush()
        self._connection.sendall(content)

    def put(self, content: bytes) -> None:
        """Buffers content until a flush or the next receive, so that many short answers are sent as one."""
        self._unsent += content

    def flush(self) -> None:
        """Says what was put."""
        if self._unsent:
            self._connection.sendall(self._unsent)
            self._unsent.clear()

    def ask(self, ask: Ask) -> None:
        """Says what is wanted."""
        head = _ASK.pack(_MAGIC[ask.way], ask.transfer_id, ask.epoch, len(ask.indices))
        self.send(head + b"".join(map(_INDEX.pack, ask.indices)))

    def asked(self) -> Ask | None:
        """The other side's request; None: it was not understood."""
        magic, transfer_id, epoch, count = _ASK.unpack(self.receive(_ASK.size))
        way = next((way for way, known in _MAGIC.items() if magic == known), None)
        if way is None or not 0 < count <= _MOST_PAGES:
            return None
        indices = [index for (index,) in _INDEX.iter_unpack(self.receive(count * _INDEX.size))]
        return Ask(way, transfer_id, epoch, indices)

    def receive(self, count: int) -> bytes:
        """So many bytes. Raises as :meth:`fill`."""
        while len(self._ahead) < count:
            self._await()
            content = self._connection.recv(_AHEAD_BYTES)
            if not content:
                raise TransferError("the other side ended the connection")
            self._ahead += content
        found = bytes(self._ahead[:count])
        del self._ahead[:count]
        return found

    def says_yes(self) -> bool:
        """A byte that is a yes. Raises as :meth:`fill`."""
        return self.receive(1) == YES

    def says_wait(self) -> None:
        """Sends, now and then, a notice that the answer is coming. Cheap to call often."""
        if time.monotonic() > self._said + SILENCE_SECONDS / 4:
            self._said = time.monotonic()
            self.goes_on()
            self.send(WAIT)

    def answer(self) -> bytes:
        """A byte that is not ``WAIT``. Raises as :meth:`fill`."""
        while (said := self.receive(1)) == WAIT:
            self.goes_on()
        return said

    def fill(self, buffer: memoryview) -> None:
        """Fills a buffer.

        Raises:
            TransferError: The other side closed the connection too early, or its time is over.
        """
        known = min(len(self._ahead), len(buffer))
        buffer[:known] = self._ahead[:known]
        del self._ahead[:known]
        buffer = buffer[known:]
        while buffer:
            self._await()
            count = self._connection.recv_into(buffer)
            if not count:
                raise TransferError("the other side ended the connection")
            buffer = buffer[count:]

    def _await(self) -> None:
        """Flushes buffered content, because an answer is wanted.

        Raises:
            TransferError: The other side's time is over.
        """
        self.flush()
        if time.monotonic() > self._until:
            raise TransferError("it takes too long")


@contextmanager
def dialled(ticket: HandoffTicket, way: Way, indices: Sequence[int], tls: PageTls | None) -> Iterator[Wire]:
    """Connects to a ticket's source and asks it for pages.

    Raises:
        TransferError: The connection failed, or broke while it was used.
    """
    host, _, port = ticket.source.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), SILENCE_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = connection if tls is None else tls.client().wrap_socket(connection)
            with secured:
                wire = Wire(secured)
                wire.ask(Ask(way, ticket.transfer_id, ticket.epoch, list(indices)))
                yield wire
    except (OSError, ValueError) as error:
        raise TransferError(f"{ticket.source}: {error}") from error


# A source's answers about the pages of a read: present, missing, or coming layer by layer while it still computes them.
#
# The source first answers for every page of the read: yes, no, or ``LATER`` for one that is coming. Then it repeatedly says
# which bytes of the coming pages are there, until all are; an empty answer says that it is still computing. The bytes follow
# each answer (TCP), or the reader reads them from the source's memory. When the step that computed the pages has succeeded,
# the source says for each coming page, in order, whether it has it now, with the header over all of its content. If the bytes
# never pass through host memory there is no checksum: instead of the header the source sends only the proof of the page's
# tokens and tenant.


_COUNT, _RANGE = struct.Struct("<I"), struct.Struct("<QQ")
_NAP_SECONDS, _SHORT_NAP_SECONDS = 1e-3, 2e-4
_MOST_RANGES = 1 << 16
COMING = b""
"""Stands for the header of a page that is still being filled."""
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
    """The source's side of a read in which the reader reads the source's memory itself.

    It says which pages are present, with their sealed headers (or proofs), and waits until the reader has read them (the reader
    sends a no now and then, and at last a yes). Then it says for each page, first those present at once, then those that came
    later, whether the page still has the ticket's content and passes ``still``.
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
    """The reader's side: yields for each page its header (or proof), ``COMING``, or None."""
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
        The pages that it turned out to have; their headers have been sent.
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
        count: Is called with the number of bytes that arrive before all layers are computed.
        take: Fills a part of a page's content. Takes the page's number among the coming ones, and the part's begin and end.
        sealed: As the source has it.

    Returns:
        For each page, its header (or proof) or None.
    """
    left = content
    while left:
        (ranges,) = _COUNT.unpack(wire.receive(_COUNT.size))
        if ranges > _MOST_RANGES:
            raise TransferError("the other side says what cannot be")
        parts = list(_RANGE.iter_unpack(wire.receive(ranges * _RANGE.size)))
        size = sum(end - start for start, end in parts)
        if size > left or any(start > end for start, end in parts):
            raise TransferError("the other side says what cannot be")
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
    """Waits until a page is there or lost, and says now and then that it is coming; returns whether it is there."""
    while source.is_coming(lease, index, on_device=on_device):
        time.sleep(nap)
        wire.says_wait()
    return source.has(lease, index, on_device=on_device)


def _reach(source: PageSource, lease: Lease, coming: Sequence[int], known: int, *, on_device: bool) -> int:
    """Waits until more than ``known`` groups of layers are present in all of these pages, or a time limit is over; returns their
    number."""
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
            time.sleep(_SHORT_NAP_SECONDS)  # the step has not begun, or its end has not been noticed yet
    return least
