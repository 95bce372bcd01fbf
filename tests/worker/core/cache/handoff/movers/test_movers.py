"""Whichever way pages go from one worker to another, what arrives is what was kept, and whatever else happens ends as an error or
as a page not had."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import socket
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import trustme
from msgspec.structs import replace

from sapwood_common.errors import ConfigError
from sapwood_testing.clock import Clock
from sapwood_testing.worker.process_memory import ProcessMemory
from sapwood_testing.worker.storage.mooncake_cluster import mooncake_is_installed
from sapwood_worker.core.cache.handoff import server, source, wire
from sapwood_worker.core.cache.handoff.leases import HandoffLeases
from sapwood_worker.core.cache.handoff.mover import MoverError, PageMover
from sapwood_worker.core.cache.handoff.movers import shm
from sapwood_worker.core.cache.handoff.movers.cuda_ipc import CudaIpcMover, ExportedPages
from sapwood_worker.core.cache.handoff.movers.mooncake import MooncakeMover, MooncakeSource
from sapwood_worker.core.cache.handoff.movers.nixl import NixlMover, NixlSource
from sapwood_worker.core.cache.handoff.movers.quickest import QuickestMover
from sapwood_worker.core.cache.handoff.movers.shm import NotSharedError, SharedMemoryMover
from sapwood_worker.core.cache.handoff.movers.tcp import TcpMover
from sapwood_worker.core.cache.handoff.server import PageServer
from sapwood_worker.core.cache.handoff.tls import PageTls
from sapwood_worker.core.cache.host.host_pages import HostPage, HostPages
from sapwood_worker.core.cache.page_key import PageChain
from sapwood_worker.core.cache.storage.record import namespace_of, verify
from sapwood_worker.model.pools.host_pool import HEADER_BYTES, HostPool, pool_bytes
from sapwood_worker.model.pools.peer_pages import OwnPool, PeerPool
from sapwood_worker.model.pools.shared_memory import SharedMemory
from sapwood_worker.records.handoff import HandoffTicket

FINGERPRINT = bytes.fromhex(namespace_of("model"))
PAGES, BYTES = 8, 200_000
MOVERS: dict[str, Callable[[PageTls | None, HostPool], PageMover]] = {
    "tcp": lambda tls, _: TcpMover(tls),
    "shm": lambda tls, _: SharedMemoryMover(tls),
    "auto": lambda tls, _: QuickestMover(tls),
}
ENGINES: dict[str, tuple[Any, Any]] = {}
if importlib.util.find_spec("nixl_cu12"):
    ENGINES["nixl"] = NixlMover, NixlSource
if mooncake_is_installed():
    ENGINES["mooncake"] = MooncakeMover, MooncakeSource


def own_pool(pages: npt.NDArray[np.uint8]) -> OwnPool:
    """Memory in place of a GPU's pages, in one layer."""
    return OwnPool([(pages.ctypes.data, BYTES, 0)], ProcessMemory(), lambda: lambda: None)


ALL = (
    MOVERS
    | {"cuda": lambda tls, _: CudaIpcMover(tls, own_pool(np.zeros((PAGES, BYTES), np.uint8)))}
    | {name: mover for name, (mover, _) in ENGINES.items()}
)


class Kept:
    """A worker that keeps a prompt's pages and serves them."""

    def __init__(self, tls: PageTls | None = None, mover: str = "tcp", *, shared: bool = True) -> None:
        self.into = HostPool(PAGES, BYTES)
        self.own = np.zeros((PAGES, BYTES), np.uint8)
        """The reader's pages of a GPU."""
        self.mover = CudaIpcMover(tls, own_pool(self.own)) if mover == "cuda" else ALL[mover](tls, self.into)
        """Whoever reads."""
        self.clock = Clock()
        memory = SharedMemory.create(pool_bytes(PAGES, BYTES)) if shared else None
        self.pool, self.host = HostPool(PAGES, BYTES, memory), HostPages(PAGES)
        self.server = PageServer("127.0.0.1", 0, tls)
        self.leases = HandoffLeases(self.host, 4, FINGERPRINT, 5, f"127.0.0.1:{self.server.port}", 1.0, self.clock)
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
        exported = ExportedPages(self.export(entries) if mover == "cuda" else b"", self.device_epochs.__getitem__)
        engines = {mover: ENGINES[mover][1](tls, self.pool)} if mover in ENGINES else {}
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
        assert isinstance(self.mover, CudaIpcMover)
        known = [self.chain.pages[index].key.proof if index < PAGES - 2 else b"" for index in indices]
        return self.mover.read_to_device(self.ticket, indices, pages, proofs or known)

    def read(self, indices: list[int], ticket: HandoffTicket | None = None) -> list[memoryview | None]:
        """The records that came and are what they should be."""
        records = [self.into.record(place) for place, _ in enumerate(indices)]
        read = self.mover.read(ticket or self.ticket, indices, records)
        checked = []
        for index, there, record in zip(indices, read, records, strict=True):
            if there:
                assert verify(record, self.chain.pages[index].key, FINGERPRINT.hex())
                assert record[HEADER_BYTES:] == bytes([index]) * BYTES
            checked.append(record if there else None)
        return checked


@pytest.fixture(params=ALL)
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    made = Kept(mover=request.param)
    yield made
    made.server.close()


@pytest.fixture
def served() -> Iterator[Kept]:
    """For what a source does before it knows how pages are to go."""
    made = Kept()
    yield made
    made.server.close()


def test_pages_arrive_as_they_were_kept(kept: Kept) -> None:
    assert None not in kept.read([4, 0, 5])
    assert kept.read([1, 99])[1] is None  # the ticket has no such page


def test_a_lease_that_has_ended_another_process_and_an_unknown_ticket_give_nothing(kept: Kept) -> None:
    assert kept.read([0], replace(kept.ticket, epoch=6)) == [None]
    assert kept.read([0], replace(kept.ticket, transfer_id=bytes(16))) == [None]
    kept.leases.release([kept.ticket.transfer_id])
    assert kept.read([0, 1]) == [None, None]


def test_a_page_that_is_given_to_another_while_it_is_sent_is_not_had(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = source.header_of  # type: ignore[attr-defined]

    def sealed_too_late(record: memoryview, *rest: object) -> bytes:
        """Between the first look at the epoch and the seal all memory goes to somebody else."""
        if bytes(record[HEADER_BYTES : HEADER_BYTES + 1]) == b"\2":
            kept.leases._unpin(kept.leases._leases[kept.ticket.transfer_id])
            other = PageChain(b"other", 4)
            other.extend(array("I", [7] * 4 * PAGES), 4 * PAGES)
            for entry in kept.host.reserve(other.pages):
                kept.pool.record(entry.page)[HEADER_BYTES:] = b"\xff" * BYTES
        return sealed(record, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(source, "header_of", sealed_too_late)
    came = kept.read([0, 1, 2, 3])
    sent = isinstance(kept.mover, TcpMover)  # page by page; in shared memory all are read at last
    assert [record is not None for record in came] == [sent, sent, False, False]


def test_nobody_there_is_an_error_and_so_is_a_source_that_is_no_address(kept: Kept) -> None:
    kept.server.close()
    for address in (kept.ticket.source, "nowhere", "127.0.0.1:99999"):
        with pytest.raises(MoverError):
            kept.read([0], replace(kept.ticket, source=address))


def _is_hung_up_on(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it had said more than was read
        return True


def _silent(connection: socket.socket) -> None:
    connection.recv(100)


def _halfway(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"\1" + bytes(1000))
    connection.close()


@pytest.mark.parametrize("behave", [_silent, _halfway])
def test_a_source_that_stops_answering_is_an_error(
    kept: Kept, behave: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            connection, _ = listener.accept()
            held.append(connection)
            behave(connection)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(MoverError):
            kept.read([0], replace(kept.ticket, source=f"127.0.0.1:{listener.getsockname()[1]}"))
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: pages\r\n\r\nand so on and so on",
        wire._ASK.pack(b"SAPWHO01", bytes(16), 5, 2**32 - 1),
        wire._ASK.pack(b"SAPWHO01", bytes(16), 5, 0),
    ],
    ids=["http", "too many pages", "no page"],
)
def test_whoever_asks_for_something_else_is_hung_up_on(served: Kept, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.server.port), 30) as stranger:
        stranger.sendall(said)
        assert _is_hung_up_on(stranger)
    assert None not in served.read([0])


def test_strangers_who_say_nothing_are_bounded_in_number_and_time(
    served: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.5)
    strangers = [socket.create_connection(("127.0.0.1", served.server.port), 30) for _ in range(server._MOST_READS + 3)]
    assert all(map(_is_hung_up_on, strangers))
    for stranger in strangers:
        stranger.close()
    while True:  # the last of their threads may still be ending
        with contextlib.suppress(MoverError):
            assert None not in served.read([0])
            return


def tls_of(authority: trustme.CA, folder: Path, trusted: trustme.CA | None = None) -> PageTls:
    """A worker's files: a certificate of an authority, which it also wants of others, or that of another."""
    folder.mkdir()
    issued = authority.issue_cert("worker.internal")
    files = PageTls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(str(files.cert))
    issued.private_key_pem.write_to_path(str(files.key))
    (trusted or authority).cert_pem.write_to_path(str(files.ca))
    return files


@pytest.mark.parametrize("mover", MOVERS)
def test_over_tls_pages_arrive_at_who_has_a_certificate_of_the_workers_ca_and_nowhere_else(
    mover: str, tmp_path: Path
) -> None:
    ours, others = trustme.CA(), trustme.CA()
    kept = Kept(tls_of(ours, tmp_path / "source"), mover)
    try:
        kept.mover = MOVERS[mover](tls_of(ours, tmp_path / "reader"), kept.into)
        assert None not in kept.read([4, 0, 5])
        kept.mover = MOVERS[mover](None, kept.into)
        with contextlib.suppress(MoverError):  # or the first byte of TLS's complaint, which is no yes
            assert kept.read([0]) == [None]
        for stranger in (
            tls_of(others, tmp_path / "other"),
            tls_of(others, tmp_path / "knows-us", trusted=ours),
            tls_of(ours, tmp_path / "does-not", trusted=others),
        ):
            kept.mover = MOVERS[mover](stranger, kept.into)
            with pytest.raises(MoverError):
                kept.read([0])
        kept.mover = MOVERS[mover](tls_of(ours, tmp_path / "again"), kept.into)
        assert None not in kept.read([0])
    finally:
        kept.server.close()


def test_within_a_host_no_page_goes_through_a_socket(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    received = 0
    fill = wire.Wire.fill

    def counted(self: wire.Wire, buffer: memoryview) -> None:
        nonlocal received
        received += len(buffer)
        fill(self, buffer)

    monkeypatch.setattr(wire.Wire, "fill", counted)
    assert None not in kept.read([3, 1])
    assert (received < BYTES) is not isinstance(kept.mover, TcpMover)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_refused_where_all_else_is_encrypted_and_where_the_source_has_none(
    name: str, tmp_path: Path
) -> None:
    mover, source = ENGINES[name]
    kept = Kept()
    try:
        files = tls_of(trustme.CA(), tmp_path / "files")
        for refused in (mover, source):
            with pytest.raises(ConfigError, match=rf"--handoff-mover {name} .*--tls-cert"):
                refused(files, kept.into)
        kept.mover = mover(None, kept.into)
        with pytest.raises(MoverError, match="no such engine"):
            kept.read([0])
    finally:
        kept.server.close()


class Elsewhere(NamedTuple):
    """What a source on another machine, in another container or of another user says of its memory."""

    path: str
    identity: tuple[int, int]


@pytest.mark.parametrize("how", ["no file", "another file", "another boot", "nothing shared"])
def test_memory_that_is_not_reached_is_no_error_where_tcp_is_there(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(mover="auto", shared=how != "nothing shared")
    try:
        memory: Any = kept.pool.shared
        if how == "no file":
            kept.pool.shared = Elsewhere("/proc/1/fd/99999", (1, 2))  # type: ignore[assignment]
        elif how == "another file":
            kept.pool.shared = Elsewhere(memory.path, (1, 2))  # type: ignore[assignment]
        elif how == "another boot":
            boots = itertools.count()
            monkeypatch.setattr(shm, "boot_name", lambda: bytes([next(boots)]) * 16)
        assert None not in kept.read([4, 0, 5])
        kept.mover = SharedMemoryMover()
        with pytest.raises(NotSharedError):
            kept.read([4])
    finally:
        kept.server.close()


def test_a_port_that_is_taken_is_named(served: Kept) -> None:
    with pytest.raises(ConfigError, match=f"--handoff-port {served.server.port}"):
        PageServer("127.0.0.1", served.server.port)


@pytest.fixture
def on_a_gpu() -> Iterator[Kept]:
    made = Kept(mover="cuda")
    yield made
    made.server.close()


def memory_of(kept: Kept) -> ProcessMemory:
    assert isinstance(kept.mover, CudaIpcMover) and isinstance(kept.mover._pool.memory, ProcessMemory)
    return kept.mover._pool.memory


def copied(kept: Kept) -> int:
    return memory_of(kept).copied


def test_pages_that_left_the_gpu_are_read_from_host_memory_and_the_others_from_the_gpu(on_a_gpu: Kept) -> None:
    assert None not in on_a_gpu.read([0, 1, 2])
    assert copied(on_a_gpu) == 3 * BYTES
    page, _ = on_a_gpu.leases._leases[on_a_gpu.ticket.transfer_id].entries[1].device or (0, 0)
    on_a_gpu.device_epochs[page] += 1
    on_a_gpu.device[page] = 255
    assert None not in on_a_gpu.read([0, 1, 2])
    assert copied(on_a_gpu) == 5 * BYTES


def test_a_page_of_the_gpu_that_is_given_to_another_while_it_is_read_is_not_had(
    on_a_gpu: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PeerPool.read

    def while_others_get_it(self: PeerPool, pages: list[int], *where: Any) -> None:
        read(self, pages, *where)
        on_a_gpu.device_epochs[pages[0]] += 1

    monkeypatch.setattr(PeerPool, "read", while_others_get_it)
    assert [record is not None for record in on_a_gpu.read([3, 4])] == [False, True]
    assert on_a_gpu.to_device([4, 5], [0, 1]) == [False, True]


def test_pages_go_from_gpu_to_gpu_if_they_are_of_the_same_tokens_and_tenant(on_a_gpu: Kept) -> None:
    page, _ = on_a_gpu.leases._leases[on_a_gpu.ticket.transfer_id].entries[1].device or (0, 0)
    on_a_gpu.device_epochs[page] += 1  # is not there any more
    assert on_a_gpu.to_device([4, 1, 2, 99], [5, 0, 3, 6]) == [True, None, True, None]
    assert on_a_gpu.own[5].tolist() == [4] * BYTES and on_a_gpu.own[3].tolist() == [2] * BYTES
    assert not on_a_gpu.own[[0, 6]].any()
    assert on_a_gpu.to_device([4], [1], [bytes(32)]) == [False]
    on_a_gpu.leases.release([on_a_gpu.ticket.transfer_id])
    assert on_a_gpu.to_device([4], [1]) == [None]


def test_a_page_of_the_gpu_is_filled_from_the_hosts_memory(on_a_gpu: Kept) -> None:
    assert isinstance(on_a_gpu.mover, CudaIpcMover)
    on_a_gpu.mover.fill([2, 4], [memoryview(bytes([value]) * BYTES) for value in (7, 9)])
    assert on_a_gpu.own[2].tolist() == [7] * BYTES and on_a_gpu.own[4].tolist() == [9] * BYTES
    assert not on_a_gpu.own[3].any()


def test_a_source_without_a_gpu_that_is_seen_from_here_is_asked_for_one_once(
    on_a_gpu: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(on_a_gpu.mover, CudaIpcMover)
    gone = replace(on_a_gpu.ticket, transfer_id=bytes(16))
    assert on_a_gpu.mover.read_to_device(gone, [0], [0], [b""]) == [None] and on_a_gpu.mover.reaches(on_a_gpu.ticket)
    kept = Kept(mover="tcp")
    try:
        kept.mover = on_a_gpu.mover
        assert kept.mover.reaches(kept.ticket) and kept.to_device([0, 1], [0, 1]) == [None, None]
        assert not kept.mover.reaches(kept.ticket) and on_a_gpu.mover.reaches(on_a_gpu.ticket)
        monkeypatch.delattr(CudaIpcMover, "_read")
        assert None not in kept.read([0, 1])
    finally:
        kept.server.close()


def test_copies_that_fail_are_an_error(on_a_gpu: Kept) -> None:
    memory_of(on_a_gpu).broken = True
    with pytest.raises(MoverError, match="719"):
        on_a_gpu.read([0])
    with pytest.raises(MoverError, match="719"):
        on_a_gpu.to_device([0], [0])
