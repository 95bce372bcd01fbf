"""Connections begin a few a turn, those that were given up not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from typing import ClassVar

import pytest
import trustme

from sapwood_net.sockets import acceptor as acceptor_module
from sapwood_net.sockets.acceptor import Acceptor
from sapwood_net.sockets.encryption import Encryption
from sapwood_net.sockets.listen import listen


class Made(asyncio.Protocol):
    """Keeps what was made, and says hello."""

    all: ClassVar[list[Made]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.all.append(self)
        self.transport = transport
        transport.write(b"hello")  # type: ignore[attr-defined]


@pytest.fixture
def made(monkeypatch) -> list[Made]:
    monkeypatch.setattr(Made, "all", [])
    return Made.all


@pytest.fixture
async def listener():
    made = listen("127.0.0.1", 0)
    yield made
    made.close()


def connect(listener: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(count)]


async def until(condition) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("what is waited for does not come")


async def test_a_few_begin_in_a_turn_and_all_in_the_end(listener, made) -> None:
    address = listener.getsockname()
    clients = connect(listener, 100)
    acceptor = Acceptor(listener, Made)
    acceptor.start()
    grown, before = [], 0
    while len(made) < 100:
        await asyncio.sleep(0)
        grown.append(len(made) - before)
        before = len(made)
    assert max(grown) <= acceptor_module._BEGUN
    for client in clients:
        assert client.recv(10) == b"hello"
        client.close()
    acceptor.close()
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_who_has_left_before_his_turn_is_nobody(listener, made) -> None:
    for client in connect(listener, 500):
        client.close()
    (stayed,) = connect(listener, 1)
    acceptor = Acceptor(listener, Made)
    acceptor.start()
    await until(lambda: made)
    assert stayed.recv(10) == b"hello"
    assert len(made) == 1
    stayed.close()
    acceptor.close()


async def test_without_descriptors_it_waits_and_tries_again(listener, made, monkeypatch) -> None:
    monkeypatch.setattr(acceptor_module, "_PAUSE", 0.01)
    tries = []

    class Full:
        def accept(self):
            tries.append(1)
            if len(tries) < 3:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return listener.accept()

        def fileno(self) -> int:
            return listener.fileno()

        def close(self) -> None:
            pass

    acceptor = Acceptor(Full(), Made)  # type: ignore[arg-type]
    acceptor.start()
    (client,) = connect(listener, 1)
    await until(lambda: made)
    assert len(tries) >= 3
    client.close()
    acceptor.close()


async def test_what_waits_is_closed_with_the_listener(listener, made, monkeypatch) -> None:
    monkeypatch.setattr(acceptor_module, "SLICE", 3600.0)  # all are accepted in the first turn
    clients = connect(listener, 50)
    acceptor = Acceptor(listener, Made)
    acceptor.start()
    while not acceptor.waiting:
        await asyncio.sleep(0)
    acceptor.close()
    for _ in range(50):
        await asyncio.sleep(0)
    begun = len(made)
    assert begun < 50
    for each in made:
        each.transport.close()
    for _ in range(50):
        await asyncio.sleep(0)
    ends = 0
    for client in clients:
        client.settimeout(5)
        try:
            while client.recv(10):
                pass
            ends += 1
        except ConnectionResetError:
            ends += 1
        client.close()
    assert ends == 50


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    return context


async def greet(listener: socket.socket) -> None:
    """A client who speaks TLS is answered."""
    checking = ssl.create_default_context()
    checking.check_hostname, checking.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*listener.getsockname(), ssl=checking)
    assert await reader.readexactly(5) == b"hello"
    writer.close()


async def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), 60) == b""
    except ConnectionResetError:
        return True


async def test_over_tls_who_says_nothing_costs_no_handshake_and_is_closed_in_time(listener, made) -> None:
    context = server_context()
    patient = Acceptor(listener, Made, Encryption(context, 3600.0, 5.0))
    patient.start()
    clients = connect(listener, 30)
    await until(lambda: patient.silent == 30)
    assert patient.handshakes == 0
    await greet(listener)
    patient.close()
    impatient = Acceptor(again := listen("127.0.0.1", 0), Made, Encryption(context, 0.05, 5.0))
    impatient.start()
    clients += connect(again, 30)
    for client in clients:
        assert await is_closed(client)
        client.close()
    assert impatient.silent == 0
    impatient.close()


async def test_of_too_many_that_say_nothing_or_half_a_handshake_the_oldest_goes(listener, made, monkeypatch) -> None:
    monkeypatch.setattr(acceptor_module, "_MOST_SILENT", 5)
    monkeypatch.setattr(acceptor_module, "_MOST_SHAKING", 5)
    acceptor = Acceptor(listener, Made, Encryption(server_context(), 60.0, 5.0))
    acceptor.start()
    silent, slow = connect(listener, 7), []
    for client in silent[:2]:
        assert await is_closed(client)
    assert acceptor.silent == 5
    for _ in range(7):
        slow += connect(listener, 1)
        slow[-1].sendall(b"\x16\x03\x01\x00\xf8\x01")  # the beginning of a handshake
        most = min(5, len(slow))
        await until(lambda most=most: acceptor.handshakes == most)
    for client in slow[:2]:
        assert await is_closed(client)
    await greet(listener)
    acceptor.close()
    for client in (*silent[2:], *slow[2:]):
        assert await is_closed(client)
    for client in (*silent, *slow):
        client.close()


class Busy:
    """Has something to do, until it has not."""

    over = False

    def go_on(self, until: float) -> bool:
        return not self.over


async def test_no_handshake_begins_while_others_wait_for_their_part_of_the_time(listener, made) -> None:
    """What a server has to do next to them has as much."""
    acceptor = Acceptor(listener, Made, Encryption(server_context(), 60, 60))
    busy = [Busy() for _ in range(acceptor_module._MOST_QUEUED)]
    for each in busy:
        for lane in (acceptor._prompt, acceptor._late):
            lane.handshakes.add(each)
    acceptor.start()
    clients = connect(listener, 3)
    for client in clients:
        client.sendall(b"\x16\x03\x01")
    await until(lambda: acceptor.waiting == 3)
    for _ in range(100):
        await asyncio.sleep(0)
    assert (acceptor.waiting, acceptor.handshakes) == (3, 0)
    busy[0].over = True
    await until(lambda: acceptor.handshakes == 3)
    busy[1].over = True
    acceptor.close()
    for client in clients:
        client.close()


async def test_who_speaks_at_once_does_not_wait_for_those_who_did_not(listener, made, monkeypatch) -> None:
    """A client with a thousand connections begins to speak on most of them late. They have a line and a time of their own."""
    monkeypatch.setattr(acceptor_module, "_PROMPT", -1.0)  # all are late
    acceptor = Acceptor(listener, Made, Encryption(server_context(), 60, 60))
    busy = [Busy() for _ in range(acceptor_module._MOST_QUEUED)]
    for each in busy:
        acceptor._late.handshakes.add(each)
    acceptor.start()
    late = connect(listener, 50)
    for client in late:
        client.sendall(b"\x16\x03\x01")
    await until(lambda: acceptor.waiting == 50)
    monkeypatch.setattr(acceptor_module, "_PROMPT", 3600.0)
    await greet(listener)
    await until(lambda: acceptor.handshakes == 0)
    assert (acceptor.waiting, len(made)) == (50, 1)
    for each in busy:
        each.over = True
    await until(lambda: acceptor.handshakes == 50)  # they have their turn
    acceptor.close()
    for client in late:
        client.close()


async def test_beyond_the_most_that_wait_the_oldest_goes(listener, made, monkeypatch) -> None:
    monkeypatch.setattr(acceptor_module, "_MOST_WAITING", 5)
    acceptor = Acceptor(listener, Made)
    pairs = [socket.socketpair() for _ in range(7)]
    for _, end in pairs:
        acceptor._line_up(acceptor._prompt, end, "a")
    assert acceptor.waiting == 5
    for client, _ in pairs[:2]:
        assert await is_closed(client)
    acceptor.close()
    for client, _ in pairs:
        client.close()


async def test_a_failed_handshake_is_its_clients_alone_who_waits_for_the_end(listener, made, caplog) -> None:
    acceptor = Acceptor(listener, Made, Encryption(server_context(), 5.0, 5.0, held=3600.0))
    acceptor.start()
    (client,) = connect(listener, 1)
    client.sendall(b"\x16 and then nonsense")
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await until(lambda: acceptor._tarpit.held == 1)
    await until(lambda: acceptor.handshakes == 0)
    await greet(listener)
    acceptor.close()
    try:
        while await loop.sock_recv(client, 100):
            pass
    except ConnectionResetError:
        pass
    client.close()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""),
        (b"\0" * 100, b""),
    ],
    ids=["HTTP/1.1", "HTTP/2", "nonsense"],
)
async def test_who_speaks_no_tls_is_closed_at_once_and_not_held(listener, made, sent, told) -> None:
    acceptor = Acceptor(listener, Made, Encryption(server_context(), 3600.0, 3600.0, held=3600.0))
    acceptor.start()
    (client,) = connect(listener, 1)
    client.sendall(sent)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    got = b""
    while data := await loop.sock_recv(client, 1000):
        got += data
    client.close()
    assert got.startswith(told)
    assert bool(got) == bool(told)
    assert (acceptor._tarpit.held, acceptor.silent, acceptor.handshakes) == (0, 0, 0)
    await greet(listener)
    acceptor.close()
