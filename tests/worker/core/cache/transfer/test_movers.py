"""Whichever way pages go from one worker to another, what arrives is what was kept, and whatever else happens ends as an error or
as a page not had."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from msgspec.structs import replace

from sapwood_common.errors import ConfigError
from sapwood_testing.worker.handoff.kept_pages import ALL, BYTES, ENGINES, MOVERS, PAGES, Kept
from sapwood_worker.core.cache.page_key import PageChain
from sapwood_worker.core.cache.transfer import leases, server, tcp, wire
from sapwood_worker.core.cache.transfer.server import PageServer
from sapwood_worker.core.cache.transfer.tcp import NotSharedError, SharedMemoryBackend, TcpBackend
from sapwood_worker.core.cache.transfer.transfer_backend import TransferError
from sapwood_worker.core.cache.transfer.wire import PageTls
from sapwood_worker.model.pools.host_pool import HEADER_BYTES


@pytest.fixture(params=ALL)
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    made = Kept(backend=request.param)
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
    sealed = leases.header_of  # type: ignore[attr-defined]

    def sealed_too_late(record: memoryview, *rest: object) -> bytes:
        """Between the first look at the epoch and the seal all memory goes to somebody else."""
        if bytes(record[HEADER_BYTES : HEADER_BYTES + 1]) == b"\2":
            kept.leases._unpin(kept.leases._leases[kept.ticket.transfer_id])
            other = PageChain(b"other", 4)
            other.extend(array("I", [7] * 4 * PAGES), 4 * PAGES)
            for entry in kept.host.reserve(other.pages):
                kept.pool.record(entry.page)[HEADER_BYTES:] = b"\xff" * BYTES
        return sealed(record, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(leases, "header_of", sealed_too_late)
    came = kept.read([0, 1, 2, 3])
    sent = isinstance(kept.backend, TcpBackend)  # page by page; in shared memory all are read at last
    assert [record is not None for record in came] == [sent, sent, False, False]


def test_nobody_there_is_an_error_and_so_is_a_source_that_is_no_address(kept: Kept) -> None:
    kept.server.close()
    for address in (kept.ticket.source, "nowhere", "127.0.0.1:99999"):
        with pytest.raises(TransferError):
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
        with pytest.raises(TransferError):
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


def test_who_has_no_ticket_is_refused_all_pages_in_one_write(served: Kept) -> None:
    """4096 writes for each stranger took the scheduler's time: other requests waited for 1.4 s."""
    writes = []

    class Connection:
        def sendall(self, content: bytes) -> None:
            writes.append(len(content))

    tcp.send_pages(wire.Wire(Connection()), served.server._source, None, range(4096))  # type: ignore[arg-type]
    assert writes == [4096]


def test_strangers_who_say_nothing_are_bounded_in_number_and_time(
    served: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_STRANGER_SECONDS", 0.5)
    count = server._MOST_STRANGERS + 3
    strangers = [socket.create_connection(("127.0.0.1", served.server.port), 30) for _ in range(count)]
    assert all(map(_is_hung_up_on, strangers))
    for stranger in strangers:
        stranger.close()
    assert None not in served.read([0])


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_hundred_slow_strangers_keep_no_good_ticket_from_its_pages(tmp_path: Path, *, encrypted: bool) -> None:
    files = tls_of(trustme.CA(), tmp_path / "files") if encrypted else None
    kept = Kept(files)
    slow: list[socket.socket] = []
    ending = threading.Event()

    def dribble() -> None:
        while not ending.wait(0.05):
            for index, stranger in enumerate(slow):
                try:
                    stranger.sendall(b"\x16" if encrypted else b"S")
                except OSError:  # it was hung up on, and comes again
                    slow[index] = socket.create_connection(("127.0.0.1", kept.server.port), 30)

    slow += [socket.create_connection(("127.0.0.1", kept.server.port), 30) for _ in range(100)]
    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        for _ in range(10):
            assert None not in kept.read([4, 0, 5])
    finally:
        ending.set()
        thread.join()
        kept.server.close()
        for stranger in slow:
            stranger.close()


def test_of_too_many_strangers_the_oldest_of_the_address_with_the_most_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_STRANGERS", 3)
    clock = [0.0]
    strangers = server._Strangers(lambda: clock[0])
    pairs = [socket.socketpair() for _ in range(5)]
    numbers = [strangers.enter(ours, address) for (ours, _), address in zip(pairs[:3], "abb", strict=True)]
    strangers.enter(pairs[3][0], "c")
    assert pairs[1][1].recv(1) == b"", "the older of b's"
    strangers.leave(numbers[0])
    strangers.leave(numbers[0])
    assert len(strangers) == 2
    clock[0] = server._STRANGER_SECONDS
    strangers.enter(pairs[4][0], "a")
    strangers.end_late()
    assert [pair[1].recv(1) for pair in pairs[2:4]] == [b"", b""]
    assert len(strangers) == 1
    pairs[0][0].sendall(b"x")
    assert pairs[0][1].recv(1) == b"x", "who has left is not ended"
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def tls_of(authority: trustme.CA, folder: Path, trusted: trustme.CA | None = None) -> PageTls:
    """A worker's files: a certificate of an authority, which it also wants of others, or that of another."""
    folder.mkdir()
    issued = authority.issue_cert("worker.internal")
    files = PageTls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(str(files.cert))
    issued.private_key_pem.write_to_path(str(files.key))
    (trusted or authority).cert_pem.write_to_path(str(files.ca))
    return files


@pytest.mark.parametrize("backend", MOVERS)
def test_over_tls_pages_go_only_to_holders_of_a_certificate_of_the_workers_ca(backend: str, tmp_path: Path) -> None:
    ours, others = trustme.CA(), trustme.CA()
    kept = Kept(tls_of(ours, tmp_path / "source"), backend)
    try:
        kept.backend = MOVERS[backend](tls_of(ours, tmp_path / "reader"), kept.into)
        assert None not in kept.read([4, 0, 5])
        kept.backend = MOVERS[backend](None, kept.into)
        with contextlib.suppress(TransferError):  # or the first byte of TLS's complaint, which is no yes
            assert kept.read([0]) == [None]
        for stranger in (
            tls_of(others, tmp_path / "other"),
            tls_of(others, tmp_path / "knows-us", trusted=ours),
            tls_of(ours, tmp_path / "does-not", trusted=others),
        ):
            kept.backend = MOVERS[backend](stranger, kept.into)
            with pytest.raises(TransferError):
                kept.read([0])
        kept.backend = MOVERS[backend](tls_of(ours, tmp_path / "again"), kept.into)
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
    assert (received < BYTES) is not isinstance(kept.backend, TcpBackend)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_refused_beside_encryption_and_without_a_source_engine(name: str, tmp_path: Path) -> None:
    backend, source = ENGINES[name]
    kept = Kept()
    try:
        files = tls_of(trustme.CA(), tmp_path / "files")
        for refused in (backend, source):
            with pytest.raises(ConfigError, match=rf"--kv-transfer {name} .*--tls-cert"):
                refused(files, kept.into)
        kept.backend = backend(None, kept.into)
        with pytest.raises(TransferError, match="no such engine"):
            kept.read([0])
    finally:
        kept.server.close()


class Elsewhere(NamedTuple):
    """What a source on another machine, in another container or of another user says of its memory."""

    path: str
    identity: tuple[int, int]


@pytest.mark.parametrize("how", ["no file", "another file", "another boot", "nothing shared"])
def test_memory_that_is_not_reached_is_no_error_where_tcp_is_there(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(backend="auto", shared=how != "nothing shared")
    try:
        memory: Any = kept.pool.shared
        if how == "no file":
            kept.pool.shared = Elsewhere("/proc/1/fd/99999", (1, 2))  # type: ignore[assignment]
        elif how == "another file":
            kept.pool.shared = Elsewhere(memory.path, (1, 2))  # type: ignore[assignment]
        elif how == "another boot":
            boots = itertools.count()
            monkeypatch.setattr(tcp, "boot_name", lambda: bytes([next(boots)]) * 16)
        assert None not in kept.read([4, 0, 5])
        kept.backend = SharedMemoryBackend()
        with pytest.raises(NotSharedError):
            kept.read([4])
    finally:
        kept.server.close()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
@pytest.mark.parametrize("backend", MOVERS)
def test_pages_are_read_over_ipv6(backend: str, host: str) -> None:
    kept = Kept(backend=backend, host=host)
    try:
        assert None not in kept.read([4, 0, 5])
    finally:
        kept.server.close()


def test_a_port_that_is_taken_is_named(served: Kept) -> None:
    with pytest.raises(ConfigError, match=f"--kv-transfer-port {served.server.port}"):
        PageServer("127.0.0.1", served.server.port)
