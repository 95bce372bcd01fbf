"""Pages by NIXL, NVIDIA's transfer library, over UCX: RDMA where there is any, memory of one host, or TCP.

The source's host pages are registered with its agent. It answers with the agent's metadata, where the pages begin, and a byte for
each page that says whether it has it, followed by the sealed header if so. The reader has its own agent read the pages into its
host pages, in place, and says that it is done; then the source says for each page that it had whether it still was what the
ticket says. The metadata go to none but who has a good ticket, since whoever has them can read all of the source's host pages.

A transfer is over when NIXL says so and not before: a read that has been given up on, and even one whose agent has been removed,
still writes once a stopped source goes on (seen over TCP with NIXL 1.5). So a read lasts as long as its transfer, its pages stay
reserved, and ``_MOST_AT_A_SOURCE`` of them keep threads free for other sources. Its request waits no longer than its patience.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.handoff.leases import Lease
from sapwood_worker.core.cache.handoff.mover import MoverError
from sapwood_worker.core.cache.handoff.source import PageSource, receive_headers, send_headers
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.core.cache.handoff.wire import NO, SILENCE_SECONDS, YES, Wire, dialled
from sapwood_worker.core.cache.storage.nixl import nixl_library
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool, record_bytes
from sapwood_worker.records.handoff import HandoffTicket

_WHERE = struct.Struct("<QI")
"""The address of the first host page in the source, and how many bytes of metadata follow."""
_NO_AGENT, _NO_TICKET = _WHERE.pack(0, 0), _WHERE.pack(2**64 - 1, 0)
_MOST_METADATA = 1 << 20
_MOST_AT_A_SOURCE = 6
"""Reads from one source at a time: fewer than ``pulls.READS``."""
_MOST_KNOWN = 64
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3


class NixlMemory:
    """An agent that knows a pool's memory. Its calls may come from several threads at once: NIXL locks it.

    Args:
        pool: The host pages.
        progresses: Whether a thread of NIXL answers others' reads over transports that want one (a sixth of a core, while idle).

    Attributes:
        where: What a reader needs to know; None if the pages lie in parts of ranks, so that no record is a page.

    Raises:
        ConfigError: NIXL is not installed, or does not start.
    """

    def __init__(self, pool: HostPool, *, progresses: bool) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are raised as well
        try:
            nixl = nixl_library()
        except ImportError as error:
            raise ConfigError(
                f"--handoff-mover nixl: NIXL is not installed here ({error}): pip install 'sapwood[nixl]'"
            ) from error
        try:
            config = nixl.nixl_agent_config(
                enable_prog_thread=progresses,
                backends=[],
                sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self.agent: Any = nixl.nixl_agent(f"sapwood-{uuid.uuid4().hex}", config)
            self.agent.create_backend("UCX")
            self.agent.register_memory([(pool.records.ctypes.data, pool.records.nbytes, 0, "")], "DRAM", ["UCX"])
            metadata = self.agent.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no class in common
            raise ConfigError(f"--handoff-mover nixl: {error}") from error
        where = _WHERE.pack(pool.records.ctypes.data, len(metadata)) + metadata
        self.where = where if pool.in_place else None


@dataclass(eq=False)
class _Remote:
    """A source's process. ``broken``: its connection is; ``name``: as the agent knows it, if it does."""

    metadata: bytes
    room: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(_MOST_AT_A_SOURCE))
    reads: int = 0
    broken: bool = False
    name: str = ""


class NixlMover:
    """Implements :class:`~sapwood_worker.core.cache.handoff.mover.PageMover`.

    Args:
        tls: Must be None: NIXL sends pages as they are.
        pool: Where the records lie that are read into.

    Raises:
        ConfigError: NIXL is not there, or pages are to be encrypted.
    """

    def __init__(self, tls: PageTls | None, pool: HostPool) -> None:
        refuse_tls(tls)
        self._agent = NixlMemory(pool, progresses=False).agent
        self._lock = threading.Lock()
        self._remotes: dict[bytes, _Remote] = {}

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        with dialled(ticket, "nixl", indices, None) as wire:
            where = wire.receive(_WHERE.size)
            if where == _NO_TICKET:
                return [False] * len(buffers)
            address, length = _WHERE.unpack(where)
            if not 0 < length <= _MOST_METADATA:
                raise MoverError("the other worker has no NIXL, or its pages are not in one piece")
            metadata = wire.receive(length)
            headers = receive_headers(wire, indices)
            here: list[tuple[int, int, int]] = []
            there: list[tuple[int, int, int]] = []
            for header, index, buffer in zip(headers, indices, buffers, strict=True):
                if header is not None:
                    buffer[:HEADER_BYTES] = header
                    content = np.frombuffer(buffer, np.uint8)[HEADER_BYTES:]
                    page, _ = ticket.places[index - ticket.first_page]
                    here.append((content.ctypes.data, len(content), 0))
                    there.append((address + page * record_bytes(len(content)) + HEADER_BYTES, len(content), 0))
            if here:
                with self._connected(metadata) as remote:
                    self._move(remote, here, there, wire)
            wire.send(YES)
            return [header is not None and wire.says_yes() for header in headers]

    @contextlib.contextmanager
    def _connected(self, metadata: bytes) -> Iterator[_Remote]:
        """A source that its agent's metadata name, while it is read from."""
        with self._lock:
            remote = self._remotes.pop(metadata, None) or _Remote(metadata)
            self._remotes[metadata] = remote  # the last: it was used last
            self._forget()
        if not remote.room.acquire(timeout=SILENCE_SECONDS):
            raise MoverError("reads from there do not end")
        try:
            with self._lock:
                self._connect(remote)
                remote.reads += 1
            try:
                yield remote
            finally:
                with self._lock:
                    remote.reads -= 1
        finally:
            remote.room.release()

    def _connect(self, remote: _Remote) -> None:
        if remote.broken and remote.reads:  # whoever is removed while it is read from goes on to write, unseen
            raise MoverError("the connection is broken")
        try:
            if remote.broken:
                self._remove(remote)
            if not remote.name:
                remote.name = self._agent.add_remote_agent(remote.metadata).decode()
        except Exception as error:
            raise MoverError(f"NIXL: {error}") from error

    def _forget(self) -> None:
        """Removes sources that were used longest ago, if there are many."""
        for metadata, remote in list(self._remotes.items())[:-_MOST_KNOWN]:
            if not remote.reads:
                del self._remotes[metadata]
                with contextlib.suppress(Exception):
                    self._remove(remote)

    def _remove(self, remote: _Remote) -> None:
        if remote.name:
            self._agent.remove_remote_agent(remote.name)
        remote.name, remote.broken = "", False

    def _move(
        self, remote: _Remote, here: list[tuple[int, int, int]], there: list[tuple[int, int, int]], wire: Wire
    ) -> None:
        """Reads, and says so now and then; when it returns or raises, the transfer is over.

        Raises:
            MoverError: Not all was read.
        """
        agent, nap, said = self._agent, _SHORTEST_NAP, time.monotonic()
        try:
            transfer = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), remote.name
            )
            state = agent.transfer(transfer)
            while state == "PROC":
                time.sleep(nap)
                nap = min(_LONGEST_NAP, 2 * nap)
                if time.monotonic() > said + SILENCE_SECONDS / 4:
                    said = time.monotonic()
                    with contextlib.suppress(OSError):  # nobody listens any more: the transfer goes on all the same
                        wire.send(NO)
                state = agent.check_xfer_state(transfer)
            agent.release_xfer_handle(transfer)
        except Exception as error:
            remote.broken = True
            raise MoverError(f"NIXL: {error}") from error
        if state != "DONE":
            remote.broken = True
            raise MoverError("NIXL could not read the pages")


def send_where(
    wire: Wire, source: PageSource, memory: NixlMemory | None, lease: Lease | None, asked: list[int]
) -> None:
    """The source's side."""
    if memory is None or memory.where is None:
        wire.send(_NO_AGENT)
    elif lease is None:
        wire.send(_NO_TICKET)
    else:
        wire.send(memory.where)
        send_headers(wire, source, lease, asked)


def refuse_tls(tls: PageTls | None) -> None:
    """Refuses to pass pages on in plain text where all else is encrypted.

    Raises:
        ConfigError: There are files for TLS.
    """
    if tls is not None:
        raise ConfigError("--handoff-mover nixl sends pages in plain text, which is not for a worker with --tls-cert")
