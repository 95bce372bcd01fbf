"""Reads pages with NIXL, NVIDIA's transfer library, over UCX: RDMA if there is any, shared memory of one host, or TCP.

Each side's host pages are registered with an agent; a reader needs the metadata of the source's agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.storage.nixl_store import nixl_library
from sapwood_worker.core.cache.transfer.in_place import Piece, Room, read_in_place, refuse_tls, wait_until_over
from sapwood_worker.core.cache.transfer.transfer_backend import PartCount, TransferError
from sapwood_worker.core.cache.transfer.wire import PageTls, Wire, dialled
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.handoff import HandoffTicket

_MOST_KNOWN = 64


def nixl_agent(pool: HostPool, *, progresses: bool) -> Any:
    """Makes an agent with a pool's memory registered. Several threads may call it at once, because NIXL locks it.

    Args:
        pool: The host pages.
        progresses: Whether a thread of NIXL answers others' reads over transports that need a thread (a sixth of a core while
            idle).

    Raises:
        ConfigError: NIXL is not installed, or does not start.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are raised as well
    try:
        nixl = nixl_library()
    except ImportError as error:
        raise ConfigError(
            f"--kv-transfer nixl: NIXL is not installed here ({error}): pip install 'sapwood[nixl]'"
        ) from error
    try:
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl.nixl_agent_config(enable_prog_thread=progresses, backends=[], sync_mode=sync)
        agent = nixl.nixl_agent(f"sapwood-{uuid.uuid4().hex}", config)
        agent.create_backend("UCX")
        agent.register_memory([(pool.buffers.ctypes.data, pool.buffers.nbytes, 0, "")], "DRAM", ["UCX"])
    except Exception as error:  # NIXL's errors have no class in common
        raise ConfigError(f"--kv-transfer nixl: {error}") from error
    return agent


class NixlSource:
    """Tells readers how to read a worker's host pages with NIXL.

    Args:
        tls: Must be None: NIXL sends pages as they are.
        pool: The host pages.

    Raises:
        ConfigError: NIXL is not installed, or pages must be encrypted.
    """

    def __init__(self, tls: PageTls | None, pool: HostPool) -> None:
        refuse_tls("nixl", tls)
        self._agent = nixl_agent(pool, progresses=True)
        self._metadata: bytes = self._agent.get_agent_metadata()

    def __call__(self, host: str) -> bytes:
        """The metadata for a reader that has reached the worker at an address."""
        return self._metadata


@dataclass(eq=False)
class _Remote:
    """A source's process. ``broken``: whether its connection is broken; ``name``: its name at the agent, if the agent knows
    it."""

    reads: int = 0
    broken: bool = False
    name: str = ""


class NixlBackend:
    """Implements :class:`~sapwood_worker.core.cache.transfer.transfer_backend.TransferBackend`.

    Args:
        tls: Must be None: NIXL sends pages as they are.
        pool: The memory of the records that reads fill.

    Raises:
        ConfigError: NIXL is not installed, or pages must be encrypted.
    """

    def __init__(self, tls: PageTls | None, pool: HostPool) -> None:
        refuse_tls("nixl", tls)
        self._agent = nixl_agent(pool, progresses=False)
        self._lock = threading.Lock()
        self._room = Room()
        self.parts = PartCount()
        self._remotes: dict[bytes, _Remote] = {}

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        with dialled(ticket, "nixl", indices, None) as wire:

            def move(metadata: bytes, here: list[Piece], there: list[Piece]) -> None:
                with self._connected(metadata) as remote:
                    self._move(remote, here, there, wire)

            return read_in_place(wire, ticket, indices, buffers, move)

    @contextlib.contextmanager
    def _connected(self, metadata: bytes) -> Iterator[_Remote]:
        """The source with these agent metadata, kept connected within the block."""
        with self._room.at(metadata):
            with self._lock:
                remote = self._remotes.pop(metadata, None) or _Remote()
                self._remotes[metadata] = remote  # moved to the end: most recently used
                self._forget()
                self._connect(remote, metadata)
                remote.reads += 1
            try:
                yield remote
            finally:
                with self._lock:
                    remote.reads -= 1

    def _connect(self, remote: _Remote, metadata: bytes) -> None:
        if remote.broken and remote.reads:  # a source that is removed during a read continues to write, unseen
            raise TransferError("the connection is broken")
        try:
            if remote.broken:
                self._remove(remote)
            if not remote.name:
                remote.name = self._agent.add_remote_agent(metadata).decode()
        except Exception as error:
            raise TransferError(f"NIXL: {error}") from error

    def _forget(self) -> None:
        """Removes the least recently used sources, if there are many."""
        for metadata, remote in list(self._remotes.items())[:-_MOST_KNOWN]:
            if not remote.reads:
                del self._remotes[metadata]
                with contextlib.suppress(Exception):
                    self._remove(remote)

    def _remove(self, remote: _Remote) -> None:
        if remote.name:
            self._agent.remove_remote_agent(remote.name)
        remote.name, remote.broken = "", False

    def _move(self, remote: _Remote, here: list[Piece], there: list[Piece], wire: Wire) -> None:
        """Reads; when it returns or raises, the transfer is over.

        Raises:
            TransferError: Not all pages were read.
        """
        agent = self._agent
        try:
            targets, sources = (
                agent.get_xfer_descs([(at, count, 0) for at, count in side], "DRAM") for side in (here, there)
            )
            transfer = agent.initialize_xfer("READ", targets, sources, remote.name)
            agent.transfer(transfer)
            wait_until_over(wire, lambda: agent.check_xfer_state(transfer) != "PROC")
            state = agent.check_xfer_state(transfer)
            agent.release_xfer_handle(transfer)
        except Exception as error:
            remote.broken = True
            raise TransferError(f"NIXL: {error}") from error
        if state != "DONE":
            remote.broken = True
            raise TransferError("NIXL could not read the pages")
