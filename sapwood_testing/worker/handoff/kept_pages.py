"""Pages that a worker keeps for others, for tests of what moves them."""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood_testing.clock import Clock
from sapwood_testing.worker.handoff.process_memory import ProcessMemory
from sapwood_testing.worker.storage.mooncake_cluster import mooncake_is_installed
from sapwood_worker.core.cache.host import HostPage, HostPages
from sapwood_worker.core.cache.page_key import PageChain
from sapwood_worker.core.cache.storage.record import namespace_of, verify
from sapwood_worker.core.cache.transfer.cuda_ipc import CudaIpcBackend, ExportedPages
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.cache.transfer.mooncake import MooncakeBackend, MooncakeSource
from sapwood_worker.core.cache.transfer.nixl import NixlBackend, NixlSource
from sapwood_worker.core.cache.transfer.server import PageServer
from sapwood_worker.core.cache.transfer.tcp import SameHostBackend, SharedMemoryBackend, TcpBackend
from sapwood_worker.core.cache.transfer.transfer_backend import TransferBackend
from sapwood_worker.core.cache.transfer.wire import PageTls
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool, SharedMemory, pool_bytes
from sapwood_worker.model.pools.peer_pages import OwnPool
from sapwood_worker.records.handoff import HandoffTicket

FINGERPRINT = bytes.fromhex(namespace_of("model"))
PAGES, BYTES = 8, 200_000
MOVERS: dict[str, Callable[[PageTls | None, HostPool], TransferBackend]] = {
    "tcp": lambda tls, _: TcpBackend(tls),
    "shm": lambda tls, _: SharedMemoryBackend(tls),
    "auto": lambda tls, _: SameHostBackend(tls),
}
ENGINES: dict[str, tuple[Any, Any]] = {}
if importlib.util.find_spec("nixl_cu12"):
    ENGINES["nixl"] = NixlBackend, NixlSource
if mooncake_is_installed():
    ENGINES["mooncake"] = MooncakeBackend, MooncakeSource


def own_pool(pages: npt.NDArray[np.uint8]) -> OwnPool:
    """Memory in place of a GPU's pages, in one layer."""
    return OwnPool([(pages.ctypes.data, BYTES, 0)], ProcessMemory(), lambda: lambda: None)


ALL = (
    MOVERS
    | {"cuda": lambda tls, _: CudaIpcBackend(tls, own_pool(np.zeros((PAGES, BYTES), np.uint8)))}
    | {name: backend for name, (backend, _) in ENGINES.items()}
)


class Kept:
    """A worker that keeps a prompt's pages and serves them, and a backend that reads them.

    Args:
        tls: What the connections are encrypted with; None: they are not.
        backend: The backend's name in :data:`ALL`.
        shared: Whether the worker keeps the pages in memory that processes share.
    """

    def __init__(
        self, tls: PageTls | None = None, backend: str = "tcp", *, shared: bool = True, host: str = "127.0.0.1"
    ) -> None:
        self.into = HostPool(PAGES, BYTES)
        self.own = np.zeros((PAGES, BYTES), np.uint8)
        """The reader's pages of a GPU."""
        self.backend = CudaIpcBackend(tls, own_pool(self.own)) if backend == "cuda" else ALL[backend](tls, self.into)
        """The reader's backend."""
        self.clock = Clock()
        memory = SharedMemory.create(pool_bytes(PAGES, BYTES)) if shared else None
        self.pool, self.host = HostPool(PAGES, BYTES, memory), HostPages(PAGES)
        self.server = PageServer(host, 0, tls)
        source = f"[{host.strip('[]')}]:{self.server.port}" if ":" in host else f"{host}:{self.server.port}"
        self.leases = TransferLeases(self.host, 4, FINGERPRINT, 5, source, 1.0, self.clock)
        prompt = array("I", range(4 * (PAGES - 2)))
        self.chain = PageChain(b"", 4)
        self.chain.extend(prompt, len(prompt))
        entries = self.host.reserve(self.chain.pages)
        for number, entry in enumerate(entries):
            self.pool.record(entry.page)[HEADER_BYTES:] = bytes([number]) * BYTES
        self.host.written(entries)
        self.leases.offer(1, prompt, b"")
        self.leases.computed(1)
        [(_, self.ticket, _)] = self.leases.poll()
        self.device_epochs = [3] * PAGES
        self.device = np.zeros((PAGES, BYTES), np.uint8)
        exported = ExportedPages(self.export(entries) if backend == "cuda" else b"", self.device_epochs.__getitem__)
        engines = {backend: ENGINES[backend][1](tls, self.pool)} if backend in ENGINES else {}
        self.server.serve(self.leases, self.pool, FINGERPRINT, engines, exported)  # type: ignore[arg-type]

    def export(self, entries: Sequence[HostPage]) -> bytes:
        """Pages of a GPU, from the last to the first, whose copies the host pages are."""
        for entry in entries:
            place = PAGES - 1 - entry.page
            entry.device = place, 3
            self.device[place] = self.pool.record(entry.page)[HEADER_BYTES:]
        return own_pool(self.device).export()

    def to_device(
        self, indices: list[int], pages: list[int], proofs: Sequence[bytes] | None = None
    ) -> list[bool | None]:
        """Which pages came, into the reader's GPU."""
        assert isinstance(self.backend, CudaIpcBackend)
        known = [self.chain.pages[index].key.proof if index < PAGES - 2 else b"" for index in indices]
        return self.backend.read_to_device(self.ticket, indices, pages, proofs or known)

    def read(self, indices: list[int], ticket: HandoffTicket | None = None) -> list[memoryview | None]:
        """The records that came and are what they should be."""
        records = [self.into.record(place) for place, _ in enumerate(indices)]
        read = self.backend.read(ticket or self.ticket, indices, records)
        checked = []
        for index, there, record in zip(indices, read, records, strict=True):
            if there:
                assert verify(record, self.chain.pages[index].key, FINGERPRINT.hex())
                assert record[HEADER_BYTES:] == bytes([index]) * BYTES
            checked.append(record if there else None)
        return checked
