"""Who broke a rule waits for the end of his connection, and nobody hears of him any more."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from typing import cast

import pytest

from sapwood_net.pacing.tarpit import Tarpit


class Server:
    """Whose connections are all held from their first byte on."""

    def __init__(self, tarpit: Tarpit) -> None:
        self.tarpit = tarpit
        self.heard = 0
        self.lost = 0

    async def connect(self) -> socket.socket:
        """A client that has sent something; it is held."""
        client, end = socket.socketpair()
        end.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _Holding(self), end)
        heard = self.heard
        client.sendall(b"hello")
        while self.heard == heard:
            await asyncio.sleep(0)
        return client


class _Holding(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.server.heard += 1
        self.transport.write(b"goodbye")
        self.server.tarpit.hold(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.lost += 1


@pytest.fixture
async def make_server() -> AsyncIterator[object]:
    made: list[Tarpit] = []

    def make(**options) -> Server:
        made.append(Tarpit(**options))
        return Server(made[-1])

    yield make
    for tarpit in made:
        tarpit.close()


def is_open(client: socket.socket) -> bool:
    """Whether the server has not closed; what it said is read."""
    client.setblocking(False)
    try:
        while client.recv(100):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


async def until_closed(client: socket.socket) -> None:
    async with asyncio.timeout(60):
        while is_open(client):
            await asyncio.sleep(0.001)


async def test_the_last_words_leave_at_once_and_the_connection_closes_later(make_server) -> None:
    server = make_server(seconds=3600.0)
    client = await server.connect()
    assert client.recv(100) == b"goodbye"
    client.sendall(b"more")
    for _ in range(20):
        await asyncio.sleep(0)
    assert is_open(client)
    assert (server.tarpit.held, server.heard, server.lost) == (1, 1, 0)
    server.tarpit.close()
    await until_closed(client)
    assert (server.tarpit.held, server.heard, server.lost) == (0, 1, 0)
    client.close()


async def test_connections_are_closed_in_time_and_in_order(make_server) -> None:
    server = make_server(seconds=0.02)
    clients = [await server.connect() for _ in range(100)]
    for client in clients:
        await until_closed(client)
    assert server.tarpit.held == 0
    late = await server.connect()  # and continues
    await until_closed(late)
    for client in (*clients, late):
        client.close()


async def test_beyond_its_size_the_oldest_closes(make_server) -> None:
    server = make_server(seconds=3600.0, most=3)
    clients = [await server.connect() for _ in range(5)]
    for client in clients[:2]:
        await until_closed(client)
    assert [is_open(client) for client in clients] == [False, False, True, True, True]
    assert server.tarpit.held == 3
    for client in clients:
        client.close()


async def test_without_time_and_after_its_end_it_closes_at_once(make_server) -> None:
    for server in (make_server(seconds=0), make_server(seconds=3600.0)):
        server.tarpit.close()
        client = await server.connect()
        await until_closed(client)
        assert server.tarpit.held == 0
        client.close()


class _Encrypted(asyncio.Transport):
    """Refers to its protocol for as long as it lives, as a connection over TLS does."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def abort(self) -> None:
        cast(asyncio.Protocol, self.protocol).connection_lost(None)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_connection_that_is_over_does_not_wait_for_the_collector(leaves: bool) -> None:
    tarpit = Tarpit(seconds=60.0)
    gc.disable()
    try:
        transport = _Encrypted()
        gone = weakref.ref(transport)
        tarpit.hold(transport)
        if leaves:
            transport.abort()
        else:
            tarpit.close()
        del transport
        assert gone() is None
    finally:
        gc.enable()
    tarpit.close()
