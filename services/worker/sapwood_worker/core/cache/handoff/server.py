"""Answers reads of the pages that a worker keeps for others, beside its scheduler.

Bound: ``_MOST_READS`` connections at a time, one thread each; one more is closed, and its reader computes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.handoff import wire
from sapwood_worker.core.cache.handoff.leases import HandoffLeases
from sapwood_worker.core.cache.handoff.mover import MoverError
from sapwood_worker.core.cache.handoff.movers import cuda_ipc, in_place, shm, tcp
from sapwood_worker.core.cache.handoff.source import PageSource
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.handoff_stages import reached

logger = logging.getLogger(__name__)

_MOST_READS = 64


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
        v6 = ":" in host
        family, both = (socket.AF_INET6, socket.has_dualstack_ipv6()) if v6 else (socket.AF_INET, False)
        try:
            address = host.strip("[]"), port
            self._listener = socket.create_server(address, family=family, backlog=_MOST_READS, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(f"--handoff-port {port}: cannot listen on {host}: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._room = threading.BoundedSemaphore(_MOST_READS)

    def serve(
        self,
        leases: HandoffLeases,
        pool: HostPool,
        fingerprint: bytes,
        engines: Mapping[wire.Way, Callable[[str], bytes]] | None = None,
        device: cuda_ipc.ExportedPages | None = None,
    ) -> None:
        """Begins to answer: from a ledger, with the pages of a host pool.

        Args:
            leases: The ledger.
            pool: The host pages.
            fingerprint: What pages hold besides tokens.
            engines: For each way that a transfer engine serves: tells what its readers need to know, given the address by which
                they have reached the worker.
            device: The GPU's pages, where readers may take them from there.
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
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(wire.SILENCE_SECONDS)  # of a handshake it is the time for all of it
                if self._tls is None:
                    self._answer_read(connection)
                else:
                    with self._tls.server().wrap_socket(connection, server_side=True) as secured:
                        self._answer_read(secured)
        except (OSError, MoverError):  # the asker is gone, or is none
            pass
        except Exception:
            logger.exception("a read of handed-off pages failed")
        finally:
            self._room.release()

    def _answer_read(self, connection: socket.socket) -> None:
        at = wire.Wire(connection)
        asked = at.asked()
        if asked is None:
            return
        reached("read asked for")
        lease = self._source.leases.find(asked.transfer_id, asked.epoch)
        if asked.way == "tcp":
            tcp.send_pages(at, self._source, lease, asked.indices)
        elif asked.way == "shm":
            shm.send_where(at, self._source, lease, asked.indices)
        elif asked.way == "cuda" or asked.way == "device":
            sealed = asked.way == "cuda"
            cuda_ipc.send_where(at, self._source, self._device, lease, asked.indices, sealed=sealed)
        else:
            engine = self._engines.get(asked.way)
            known = None if engine is None else partial(engine, connection.getsockname()[0])
            in_place.send_where(at, self._source, known, lease, asked.indices)
