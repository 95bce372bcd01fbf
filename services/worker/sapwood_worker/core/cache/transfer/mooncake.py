"""Reads pages with Mooncake's transfer engine: over RDMA if there is any, else TCP.

Each side's host pages are registered with an engine; a reader needs the port of the source's engine. That engine answers anybody
who reaches it, without a ticket.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Sequence
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.transfer.in_place import Piece, Room, read_in_place, refuse_tls, wait_until_over
from sapwood_worker.core.cache.transfer.transfer_backend import PartCount, TransferError
from sapwood_worker.core.cache.transfer.wire import PageTls, Wire, dialled
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.handoff import HandoffTicket

_PORT = struct.Struct("<H")


def _mooncake_engine(pool: HostPool, host: str) -> Any:
    """Makes an engine with a pool's memory registered, reachable at an address.

    Raises:
        ConfigError: Mooncake is not installed, or does not start.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # below that it logs every connection
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"--kv-transfer mooncake: Mooncake is not installed here ({error}): pip install 'sapwood[mooncake]', and "
            "libibverbs1, libcurl4, libnuma1"
        ) from error
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise ConfigError("--kv-transfer mooncake: its transfer engine does not start")
    if engine.register_memory(pool.buffers.ctypes.data, pool.buffers.nbytes) != 0:
        raise ConfigError(f"--kv-transfer mooncake: it does not take {pool.buffers.nbytes} bytes of host pages")
    return engine


class MooncakeSource:
    """Tells readers how to read a worker's host pages with Mooncake.

    Args:
        tls: Must be None: Mooncake sends pages as they are.
        pool: The host pages.

    Raises:
        ConfigError: Pages are to be encrypted.
    """

    def __init__(self, tls: PageTls | None, pool: HostPool) -> None:
        refuse_tls("mooncake", tls)
        self._lock = threading.Lock()
        self._engine = functools.lru_cache(functools.partial(_mooncake_engine, pool))

    def __call__(self, host: str) -> bytes:
        """The metadata for a reader that has reached the worker at an address. There is one engine for each address, because an
        engine sends its own address to every client that connects."""
        with self._lock:
            return _PORT.pack(self._engine(host).get_rpc_port())


class MooncakeBackend:
    """Implements :class:`~sapwood_worker.core.cache.transfer.transfer_backend.TransferBackend`.

    Args:
        tls: Must be None: Mooncake sends pages as they are.
        pool: The memory of the records that reads fill.

    Raises:
        ConfigError: Mooncake is not installed, or pages must be encrypted.
    """

    def __init__(self, tls: PageTls | None, pool: HostPool) -> None:
        refuse_tls("mooncake", tls)
        self._engine = _mooncake_engine(pool, "127.0.0.1")  # nobody connects to it
        self._room = Room()
        self.parts = PartCount()

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        with dialled(ticket, "mooncake", indices, None) as wire:

            def move(known: bytes, here: list[Piece], there: list[Piece]) -> None:
                [port] = _PORT.unpack(known)
                source = f"{ticket.source.rpartition(':')[0]}:{port}"
                with self._room.at(source.encode()):
                    self._move(source, here, there, wire)

            return read_in_place(wire, ticket, indices, buffers, move)

    def _move(self, source: str, here: list[Piece], there: list[Piece], wire: Wire) -> None:
        """Reads each page with a transfer of its own, because a transfer of several pages is reported as failed at its first bad
        page while others still arrive. When this returns or raises, all transfers are over.

        Raises:
            TransferError: Not all pages were read.
        """
        engine = self._engine
        begun = [
            engine.batch_transfer_async_read(source, [target], [at], [count])
            for (target, count), (at, _) in zip(here, there, strict=True)
        ]
        failed = 0
        for transfer in begun:
            if not transfer:
                failed += 1
                continue
            state = 0

            def is_over(transfer: int = transfer) -> bool:
                nonlocal state
                state = int(engine.transfer_check_status(transfer))  # not again after its end: it is forgotten then
                return state != 0

            wait_until_over(wire, is_over)
            failed += state < 0
        if failed:
            raise TransferError(f"Mooncake could not read {failed} of {len(begun)} pages")
