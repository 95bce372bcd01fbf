"""What waits on all connections together has a bound, and the client with the most gives way."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from sapwood_common.errors import SapwoodError
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_router.edges.http1 import connection as connection_module
from sapwood_router.edges.http1 import held_bytes
from sapwood_router.edges.http1.body import Body
from sapwood_testing.router.http1_requests import KB


async def test_what_waits_on_all_connections_has_a_bound_and_who_sent_most_gives_way(serve, wait_until) -> None:
    bodies = BodyMemory(300 * KB)
    async with serve(bodies=bodies) as site:
        clients = [await site.connect() for _ in range(12)]
        for number, client in enumerate(clients):
            client.send(b"GET / HTTP/1.1\r\na: " + b"a" * ((60 if number == 0 else 40) * KB))
        status, headers, _ = await clients[0].answer()
        assert (status, headers["connection"]) == (503, "close")
        assert bodies.held <= bodies.most
        small = await site.connect()
        small.send(b"GET /small HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await small.answer())[0] == 200
        for client in clients:
            client.abort()
        await wait_until(lambda: bodies.held == 0)


async def test_requests_that_wait_behind_one_that_is_answered_count_until_they_are_read(serve, wait_until) -> None:
    bodies, release = BodyMemory(300 * KB), asyncio.Event()

    async def wait(request) -> None:
        await release.wait()
        await request.respond(200, [])

    async with serve(wait, bodies=bodies) as site:
        client = await site.connect()
        request = b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"a" * 20 * KB + b"\r\n\r\n"
        client.send(request * 3)
        await wait_until(lambda: bodies.held == 2 * len(request))
        release.set()
        for _ in range(3):
            assert (await client.answer())[0] == 200
        assert bodies.held == 0


async def test_a_body_that_is_all_there_counts_until_its_turn_and_may_be_given_up(serve, wait_until) -> None:
    bodies, turn, sizes = BodyMemory(300 * KB), asyncio.Event(), []

    async def take(request) -> None:
        async def wait(body: Body) -> None:
            sizes.append(body.size)
            await turn.wait()

        try:
            body = await request.receive_body(1 << 20, wait)
        except SapwoodError:
            await request.respond(503, [])
        else:
            await request.respond(200, [], b"%d" % len(body))

    async with serve(take, bodies=bodies) as site:
        clients = [await site.connect() for _ in range(3)]
        for client, size in zip(clients, (200 * KB, 90 * KB, 70 * KB), strict=True):
            before = len(sizes)
            client.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % size, b"a" * size)
            await wait_until(lambda before=before: len(sizes) > before)
        assert 160 * KB <= bodies.held <= bodies.most
        turn.set()
        answers = [await client.answer() for client in clients]
        assert [status for status, _, _ in answers] == [503, 200, 200]
        assert [body for _, _, body in answers[1:]] == [b"%d" % (90 * KB), b"%d" % (70 * KB)]
        await wait_until(lambda: bodies.held == 0)


@pytest.mark.parametrize("ends", [b"", b"connection: close\r\n"], ids=["kept", "closed"])
async def test_answers_that_clients_are_slow_to_read_count_and_the_largest_goes(
    serve, wait_until, monkeypatch, ends
) -> None:
    monkeypatch.setattr(held_bytes, "_SLOW_SECONDS", 0.01)
    fail, failed = connection_module.HttpConnection.fail, []

    def counted(connection, error) -> None:
        failed.append(connection)
        fail(connection, error)

    monkeypatch.setattr(connection_module.HttpConnection, "fail", counted)
    bodies, answer = BodyMemory(4 * 1024 * KB), bytes(24 * 1024 * KB)  # more than the kernel takes, and than fits

    async def give(request) -> None:
        await request.respond(200, [], answer if request.head.path == "/much" else b"little")

    async with serve(give, bodies=bodies) as site:
        slow = [await site.connect() for _ in range(6)]
        for client in slow:
            client.writer.transport.pause_reading()
            client.send(b"GET /much HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % ends)
        modest = await site.connect()
        await wait_until(lambda: len(failed) == 2)  # each counts a quarter of all memory
        assert bodies.held == bodies.most
        modest.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await modest.answer())[2] == b"little"
        for client in slow:
            client.writer.transport.resume_reading()
        whole = 0
        for client in slow:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                whole += (await client.answer())[2] == answer
        assert whole == 4
    await wait_until(lambda: bodies.held == 0)
