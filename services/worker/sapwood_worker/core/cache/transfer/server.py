"""Answers reads of the pages that a worker keeps for others, in threads beside its scheduler.

Each connection has a thread. A connection that has shown no valid ticket is a stranger. There are at most ``_MOST_STRANGERS``
strangers, each for ``_STRANGER_SECONDS`` including the TLS handshake; above that, the oldest stranger of the address with the
most is closed. Reads with a valid ticket have ``_MOST_READS`` places of their own; one more waits for a moment and is then
closed, and its reader computes the prompt.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.transfer import cuda_ipc, in_place, tcp, wire
from sapwood_worker.core.cache.transfer.leases import Lease, PageSource, TransferLeases
from sapwood_worker.core.cache.transfer.transfer_backend import TransferError
from sapwood_worker.core.cache.transfer.wire import PageTls
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.handoff import log_stage

logger = logging.getLogger(__name__)

_MOST_READS = 64
_MOST_STRANGERS = 128
_STRANGER_SECONDS = 2.0
_LOOK_SECONDS = 0.25
_PAUSE_SECONDS = 0.002
"""The pause between accepting two strangers while there are many: starting a thread for each takes time from the scheduler."""
_BACKLOG = 1024


class _Strangers:
    """Connections that have shown no good ticket yet. Thread-safe.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._number = 0
        self._known: dict[int, tuple[socket.socket, str, float]] = {}
        """By number, oldest first: a handle of the connection, the address, and the end of its time."""

    def __len__(self) -> int:
        return len(self._known)

    def enter(self, connection: socket.socket, address: str) -> int:
        """Counts a connection; ends another one if there are too many. Returns its number for :meth:`leave`."""
        handle = connection.dup()  # TLS takes ownership of the connection
        with self._lock:
            if len(self._known) >= _MOST_STRANGERS:
                [(most, _)] = Counter(address for _, address, _ in self._known.values()).most_common(1)
                oldest = next(number for number, (_, address, _) in self._known.items() if address == most)
                _end(self._known.pop(oldest)[0])
            self._number += 1
            self._known[self._number] = handle, address, self._clock() + _STRANGER_SECONDS
            return self._number

    def leave(self, number: int) -> None:
        """Notes that the connection has shown a valid ticket, or is over. May be called again."""
        with self._lock:
            handle, _, _ = self._known.pop(number, (None, "", 0.0))
        if handle is not None:
            handle.close()

    def end_late(self) -> None:
        """Ends those whose time is over."""
        now = self._clock()
        with self._lock:
            for number, (handle, _, until) in list(self._known.items()):
                if now >= until:
                    del self._known[number]
                    _end(handle)


def _end(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
    handle.close()


class PageServer:
    """Answers reads, each in a thread of its own, until the process ends.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        tls: Its files; None: plain text.

    Attributes:
        port: The port.

    Raises:
        ConfigError: The server cannot listen on the address.
    """

    def __init__(self, host: str, port: int, tls: PageTls | None = None) -> None:
        self._tls = tls
        v6 = ":" in host
        family, both = (socket.AF_INET6, socket.has_dualstack_ipv6()) if v6 else (socket.AF_INET, False)
        try:
            address = host.strip("[]"), port
            self._listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(f"--kv-transfer-port {port}: cannot listen on {host}: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._listener.settimeout(_LOOK_SECONDS)
        self._room = threading.BoundedSemaphore(_MOST_READS)
        self._strangers = _Strangers()
        self._context: tuple[float, ssl.SSLContext] | None = None

    def serve(
        self,
        leases: TransferLeases,
        pool: HostPool,
        fingerprint: bytes,
        engines: Mapping[wire.Way, Callable[[str], bytes]] | None = None,
        device: cuda_ipc.ExportedPages | None = None,
    ) -> None:
        """Begins to answer: from a ledger, with the pages of a host pool.

        Args:
            leases: The ledger.
            pool: The host pages.
            fingerprint: A hash of everything besides tokens that pages depend on.
            engines: For each transfer engine: returns the metadata for its readers, given the address by which they reached the
                worker.
            device: The GPU's pages, if readers may read them there.
        """
        self._device = device
        self._engines = engines or {}
        self._source = PageSource(leases, pool, fingerprint.hex())
        threading.Thread(target=self._accept, name="handoff", daemon=True).start()

    def close(self) -> None:
        """Answers nothing new."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._strangers.end_late()
            if len(self._strangers) > _MOST_STRANGERS // 2:
                time.sleep(_PAUSE_SECONDS)
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # out of file descriptors, perhaps for a moment
                continue
            try:
                number = self._strangers.enter(connection, str(peer[0]))
                threading.Thread(
                    target=self._answer, args=(connection, number), name="handoff read", daemon=True
                ).start()
            except (OSError, RuntimeError):  # out of file descriptors or threads
                connection.close()

    def _encryption(self, tls: PageTls) -> ssl.SSLContext:
        """The TLS context of connections; changed files take effect within a second."""
        now = time.monotonic()
        known = self._context
        if known is None or now - known[0] > 1:
            known = self._context = now, tls.server()
        return known[1]

    def _answer(self, connection: socket.socket, stranger: int) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(wire.SILENCE_SECONDS)  # of a handshake it is the time for all of it
                if self._tls is None:
                    self._answer_read(connection, stranger)
                else:
                    with self._encryption(self._tls).wrap_socket(connection, server_side=True) as secured:
                        self._answer_read(secured, stranger)
        except (OSError, TransferError):  # the asker is gone, or is none
            pass
        except Exception:
            logger.exception("a read of handed-off pages failed")
        finally:
            self._strangers.leave(stranger)

    def _answer_read(self, connection: socket.socket, stranger: int) -> None:
        at = wire.Wire(connection)
        asked = at.asked()
        if asked is None:
            return
        log_stage("read asked for")
        lease = self._source.leases.find(asked.transfer_id, asked.epoch)
        if lease is None:  # which is told at once
            self._send(at, asked, lease, connection)
            return
        self._strangers.leave(stranger)
        if self._room.acquire(timeout=wire.SILENCE_SECONDS / 2):
            try:
                self._send(at, asked, lease, connection)
            finally:
                self._room.release()

    def _send(self, at: wire.Wire, asked: wire.Ask, lease: Lease | None, connection: socket.socket) -> None:
        if asked.way == "tcp":
            tcp.send_pages(at, self._source, lease, asked.indices)
        elif asked.way == "shm":
            tcp.send_where(at, self._source, lease, asked.indices)
        elif asked.way == "cuda" or asked.way == "device":
            sealed = asked.way == "cuda"
            cuda_ipc.send_where(at, self._source, self._device, lease, asked.indices, sealed=sealed)
        else:
            engine = self._engines.get(asked.way)
            known = None if engine is None else partial(engine, connection.getsockname()[0])
            in_place.send_where(at, self._source, known, lease, asked.indices)
