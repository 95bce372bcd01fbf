"""Moves pages over TCP: a server beside the scheduler of the worker that keeps them, and the mover that asks it.

A connection carries one read. The asker sends ``_ASK`` (magic, transfer id, epoch, number of pages) and a 4-byte index for each
page. The server answers, page by page, a byte that says whether it has the page; if so the sealed record follows, and a byte that
says whether the page still was what the ticket says after all of it had been sent. Nothing else is understood: a connection
that says anything else, or nothing for ``_SILENCE_SECONDS``, is closed.

Bound: ``_MOST_READS`` connections at a time, one thread each; one more is closed, and its asker computes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence

from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.handoff.leases import HandoffLeases, Lease
from sapwood_worker.core.cache.handoff.mover import MoverError
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.core.cache.storage.record import header_of
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool
from sapwood_worker.records.handoff import HandoffTicket

logger = logging.getLogger(__name__)

_ASK = struct.Struct("<8s16sQI")
_INDEX = struct.Struct("<I")
_MAGIC = b"SAPWHO01"
_MOST_PAGES = 4096
_MOST_READS = 64
_SILENCE_SECONDS = 1.0
_READ_SECONDS = 4.0
"""The most that a whole read takes; whoever asked waits little longer (``pulls.PATIENCE_SECONDS``)."""
_YES, _NO = b"\1", b"\0"


class PageServer:
    """Answers reads, each in a thread of its own, until the process ends.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        tls: Its files; None: plain text.

    Attributes:
        port: The port.

    Raises:
        ConfigError: It cannot be listened on.
    """

    def __init__(self, host: str, port: int, tls: PageTls | None = None) -> None:
        self._tls = tls
        try:
            self._listener = socket.create_server((host, port), backlog=_MOST_READS)
        except OSError as error:
            raise ConfigError(f"--handoff-port {port}: cannot listen on {host}: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._room = threading.BoundedSemaphore(_MOST_READS)

    def serve(self, leases: HandoffLeases, pool: HostPool, fingerprint: bytes) -> None:
        """Begins to answer: from a ledger, with the pages of a host pool."""
        self._leases, self._pool, self._namespace = leases, pool, fingerprint.hex()
        threading.Thread(target=self._accept, name="handoff", daemon=True).start()

    def close(self) -> None:
        """Answers nothing new."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # out of file descriptors, perhaps for a moment
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="handoff read", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_SILENCE_SECONDS)  # of a handshake it is the time for all of it
                if self._tls is None:
                    self._send_pages(connection)
                else:
                    with self._tls.server().wrap_socket(connection, server_side=True) as secured:
                        self._send_pages(secured)
        except (OSError, MoverError):  # the asker is gone, or is none
            pass
        except Exception:
            logger.exception("a read of handed-off pages failed")
        finally:
            self._room.release()

    def _send_pages(self, connection: socket.socket) -> None:
        until = time.monotonic() + _READ_SECONDS
        ask = bytearray(_ASK.size)
        _receive(connection, memoryview(ask), until)
        magic, transfer_id, epoch, count = _ASK.unpack(ask)
        if magic != _MAGIC or not 0 < count <= _MOST_PAGES:
            return
        wanted = bytearray(count * _INDEX.size)
        _receive(connection, memoryview(wanted), until)
        lease = self._leases.find(transfer_id, epoch)
        for (index,) in _INDEX.iter_unpack(wanted):
            if lease is None or index >= len(lease.keys) or not self._leases.readable(lease, index):
                connection.sendall(_NO)
            else:
                self._send_page(connection, lease, index)

    def _send_page(self, connection: socket.socket, lease: Lease, index: int) -> None:
        record = self._pool.packed(lease.ticket.places[index][0])
        connection.sendall(_YES + header_of(record, lease.keys[index], self._namespace))
        connection.sendall(record[HEADER_BYTES:])
        still = self._leases.readable(lease, index)
        if still:
            self._leases.was_read(lease, index)
        connection.sendall(_YES if still else _NO)


class TcpMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.mover.PageMover` by asking a :class:`PageServer`.

    Args:
        tls: Its files; None: plain text.
    """

    def __init__(self, tls: PageTls | None = None) -> None:
        self._tls = tls

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        host, _, port = ticket.source.rpartition(":")
        until = time.monotonic() + _READ_SECONDS
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _SILENCE_SECONDS) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is None:
                    return _ask(connection, ticket, indices, buffers, until)
                with self._tls.client().wrap_socket(connection) as secured:
                    return _ask(secured, ticket, indices, buffers, until)
        except (OSError, ValueError) as error:
            raise MoverError(f"{ticket.source}: {error}") from error


def _ask(
    connection: socket.socket,
    ticket: HandoffTicket,
    indices: Sequence[int],
    buffers: Sequence[memoryview],
    until: float,
) -> list[bool]:
    ask = _ASK.pack(_MAGIC, ticket.transfer_id, ticket.epoch, len(indices))
    connection.sendall(ask + b"".join(map(_INDEX.pack, indices)))
    return [_receive_page(connection, buffer, until) for buffer in buffers]


def _receive_page(connection: socket.socket, buffer: memoryview, until: float) -> bool:
    return _receive_byte(connection, until) and _receive_record(connection, buffer, until)


def _receive_record(connection: socket.socket, buffer: memoryview, until: float) -> bool:
    _receive(connection, buffer, until)
    return _receive_byte(connection, until)


def _receive_byte(connection: socket.socket, until: float) -> bool:
    byte = bytearray(1)
    _receive(connection, memoryview(byte), until)
    return bytes(byte) == _YES


def _receive(connection: socket.socket, buffer: memoryview, until: float) -> None:
    """Fills a buffer.

    Raises:
        MoverError: The other side ended the connection before, or its time is over.
        OSError: The connection broke, or nothing came for too long.
    """
    while buffer:
        if time.monotonic() > until:
            raise MoverError("it takes too long")
        count = connection.recv_into(buffer)
        if not count:
            raise MoverError("the other side ended the connection")
        buffer = buffer[count:]
