"""Anybody who reaches --rendezvous without the group's key learns nothing, and comes to no store."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sapwood_common.network.keyed_ways import Purpose, StrangerError, introduce
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.worker.group_key import group_key
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.nodes import LINK, STORE, Begin, Hello, Meeting, NodeLink, Nodes, Refused, StoreTunnel

SETTINGS = {"nnodes": 2, "tensor_parallel": 2, "rendezvous_key": Path(group_key())}


def config(port: int, **settings: object) -> WorkerConfig:
    return WorkerConfig(**{**SETTINGS, "rendezvous": f"127.0.0.1:{port}", **settings})  # type: ignore[arg-type]


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    """The first node of two, which waits for the other."""
    found = Nodes(config(port_of_its_own()))
    await found.start()
    yield found
    await found.close()


async def come(nodes: Nodes, key: bytes, purpose: Purpose) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(nodes.host, nodes._port)
    await introduce(reader, writer, key, purpose)
    return reader, writer


@pytest.mark.parametrize("said", [b"", b"\x00\x00\x00\x10", b"x" * 5000, b"stor" + bytes(68), b"link" + bytes(68)])
async def test_a_stranger_gets_random_bytes_and_nothing_else(nodes: Nodes, said: bytes) -> None:
    reader, writer = await asyncio.open_connection(nodes.host, nodes._port)
    greeting = await reader.readexactly(32)
    writer.write(said)
    writer.write_eof()
    rest = await reader.read()
    assert rest in (b"", bytes(32))
    assert greeting != bytes(32)
    writer.close()


async def test_a_node_with_a_wrong_key_is_refused_and_silent_strangers_delay_nobody(
    nodes: Nodes,
) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection((nodes.host, nodes._port)))
        with pytest.raises(StrangerError, match="another key"):
            await come(nodes, b"another key", Purpose(LINK, 1))
        link = NodeLink(*await come(nodes, nodes.key, Purpose(LINK, 1)), 30.0)
        link.send(Hello.of(config(nodes._port, node_rank=1)))
        await asyncio.wait_for(nodes.gather(), 60)
        link.close()


async def test_a_node_with_the_key_and_other_settings_is_told_why_it_is_refused(nodes: Nodes) -> None:
    link = NodeLink(*await come(nodes, nodes.key, Purpose(LINK, 1)), 30.0)
    link.send(Hello.of(config(nodes._port, node_rank=1, page_size=8)))
    assert await link.receive() == Refused("its --page-size is 8, here it is 16")
    link.close()


async def test_ranks_of_other_hosts_reach_the_store_by_the_key_and_strangers_do_not(nodes: Nodes) -> None:
    link = NodeLink(*await come(nodes, nodes.key, Purpose(LINK, 1)), 30.0)
    link.send(Hello.of(config(nodes._port, node_rank=1)))
    await nodes.gather()
    meeting = Meeting(nodes.host, nodes.key)
    assert meeting.store.getsockname()[0] == "127.0.0.1"
    nodes.begin(meeting)
    begin = await link.receive()
    assert isinstance(begin, Begin)
    assert meeting.key not in (begin.salt, nodes.key)
    tunnel = StoreTunnel(nodes.host, nodes._port, nodes.key, begin.epoch)
    wrong = StoreTunnel(nodes.host, nodes._port, b"another key", begin.epoch)
    late = StoreTunnel(nodes.host, nodes._port, nodes.key, begin.epoch + 1)
    meeting.store.setblocking(False)
    loop = asyncio.get_running_loop()
    for each in (wrong, late):
        reader, writer = await asyncio.open_connection("127.0.0.1", await each.start())
        assert await reader.read() == b""
        writer.close()
        each.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", await tunnel.start())
    writer.write(b"set x")
    store, _ = await asyncio.wait_for(loop.sock_accept(meeting.store), 60)
    assert await loop.sock_recv(store, 100) == b"set x"
    await loop.sock_sendall(store, b"done")
    assert await reader.readexactly(4) == b"done"
    store.close()
    assert await reader.read() == b""
    writer.close()
    tunnel.close()
    meeting.close()
    link.close()
    with pytest.raises(StrangerError):
        await come(nodes, b"another key", Purpose(STORE, begin.epoch))
