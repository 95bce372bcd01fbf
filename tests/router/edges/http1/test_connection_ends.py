"""How a connection ends: idle, unread, sent on after its last answer, or since the server stops."""

from __future__ import annotations

import asyncio

import pytest

from sapwood_router.edges.http1 import connection as connection_module
from sapwood_router.edges.http1.host import ConnectionLimits
from sapwood_router.edges.http1.server import KEEP_ALIVE
from sapwood_testing.router.http1_requests import GET, KB, MB, PLAIN, post, wait_and_tell


@pytest.mark.parametrize("before", [b"", PLAIN])
async def test_a_head_that_does_not_come_to_its_end_is_given_up(serve, before) -> None:
    async with serve(head_seconds=0.05) as site:
        client = await site.connect()
        if before:
            client.send(before)
            assert (await client.answer())[0] == 200
        client.send(GET)
        assert (await client.answer())[0] == 408
        assert await client.rest() == b""


async def test_a_client_that_speaks_tls_is_refused_at_once(serve) -> None:
    async with serve(head_seconds=600) as site:
        client = await site.connect()
        client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
        status, _, body = await client.answer()
        assert (status, body) == (400, b"this port speaks HTTP without TLS: the URL begins with http://\n")
        assert await client.rest() == b""


async def test_idle_connections_are_closed_after_their_time_and_make_room_for_others(serve, wait_until) -> None:
    assert KEEP_ALIVE > 600  # longer than those in front keep theirs
    async with serve(keep_alive=0.05) as site:
        silent, asked = await site.connect(), await site.connect()
        asked.send(PLAIN)
        assert (await asked.answer())[0] == 200
        assert await silent.rest() == await asked.rest() == b""
    gate = asyncio.Event()

    async def handler(request) -> None:
        if request.head.method == "POST":
            await gate.wait()
        await request.respond(200, [])

    async with serve(handler, most_connections=3) as site:
        busy, first, second = [await site.connect() for _ in range(3)]
        busy.send(post(0))
        for client in (second, first):
            client.send(PLAIN)
            await client.answer()
        await wait_until(lambda: len(site.seen) == 3)
        third = await site.connect()
        assert await second.rest() == b""  # it has been idle the longest
        for client in (first, third):
            client.send(post(0))
        await wait_until(lambda: len(site.seen) == 5)
        refused = await site.connect()
        assert await refused.rest() == b""
        gate.set()
        for client in (busy, first, third):
            assert (await client.answer())[0] == 200


async def test_who_reads_nothing_of_its_last_answer_loses_it(serve, wait_until) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], bytes(10_000 * KB))

    async with serve(handler, flush_seconds=0.05) as site:
        client = await site.connect(receive_buffer=4 * KB)
        client.writer.transport.pause_reading()
        client.send(GET, b"Connection: close\r\n\r\n")
        await wait_until(lambda: site.seen)
        await wait_until(lambda: not site.server.connections)


async def test_who_goes_on_sending_after_its_last_answer_is_cut_off(serve, wait_until) -> None:
    async with serve(linger_seconds=0.05) as site:
        client = await site.connect()
        client.send(b"nonsense\r\n\r\n")
        assert (await client.answer())[0] == 400
        await wait_until(lambda: not site.server.connections)


async def test_who_sends_a_refused_body_for_long_still_reads_why(serve) -> None:
    async with serve(wait_and_tell, linger_seconds=0.05, body_bytes=1) as site:
        client = await site.connect()
        client.send(post(40 * MB))
        for _ in range(40):
            client.send(bytes(KB))
            await asyncio.sleep(0.01)
        assert (await client.answer())[0] == 413
        assert len(site.server.connections) == 1


async def test_clients_without_a_request_or_with_bytes_after_the_last_are_held(serve, wait_until) -> None:
    async with serve(held_seconds=3600.0) as site:
        for number, (sent, status) in enumerate(
            [(b"nonsense\r\n\r\n", 400), (b"GET /" + bytes(70_000), 431), (GET + b"Connection: close\r\n\r\nmore", 200)]
        ):
            client = await site.connect()
            client.send(sent)
            assert (await client.answer())[0] == status
            assert site.server.tarpit.held == number + 1
            assert not site.server.connections
            assert not client.reader.at_eof()
        client = await site.connect()  # no junk but the end of line that some clients send after a body
        client.send(GET + b"Connection: close\r\n\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""
        await site.server.stop()
        for client in site.clients:
            assert await client.rest() == b""


async def test_a_client_that_sends_without_end_after_its_last_answer_is_held(serve, wait_until) -> None:
    async with serve(wait_and_tell, held_seconds=3600.0) as site:
        client = await site.connect()
        client.send(GET + b"Connection: close\r\nContent-Length: 10\r\n\r\n0123456789")
        assert (await client.answer())[0] == 200
        client = await site.connect()
        client.send(post(40 * MB))  # too large
        assert (await client.answer())[0] == 413
        for _ in range(40):
            client.send(bytes(MB))
        await wait_until(lambda: site.server.tarpit.held == 1)


async def test_a_head_that_comes_byte_by_byte_is_read_on_seldom(serve, wait_until, monkeypatch) -> None:
    async with serve() as site:
        client = await site.connect()
        for _ in range(2):
            for byte in PLAIN:
                client.send(bytes((byte,)))
                await asyncio.sleep(0)
            assert (await client.answer())[0] == 200
        monkeypatch.setattr(connection_module, "_PIECE_SECONDS", 3600.0)
        (connection,) = site.server.connections
        for number, byte in enumerate(b"GET /"):
            assert connection.transport.is_reading()
            client.send(bytes((byte,)))
            await wait_until(lambda number=number: connection._pieces == number + 1)
        assert not connection.transport.is_reading()


async def test_a_server_that_stops_lets_running_requests_end_and_closes_idle_connections(serve, wait_until) -> None:
    gate = asyncio.Event()

    async def handler(request) -> None:
        await gate.wait()
        await request.respond(200, [], b"end")

    async with serve(handler, linger_seconds=0.05) as site:
        idle, busy = await site.connect(), await site.connect()
        busy.send(PLAIN, PLAIN)
        await wait_until(lambda: site.seen)
        stopping = asyncio.ensure_future(site.server.stop())
        assert await idle.rest() == b""
        gate.set()
        status, headers, body = await busy.answer()
        assert (status, headers["connection"], body) == (200, "close", b"end")
        assert await busy.rest() == b""
        await stopping
        assert len(site.seen) == 1


async def test_what_a_server_that_stops_still_runs_is_cut_off(serve, wait_until, monkeypatch) -> None:
    monkeypatch.setattr("sapwood_router.edges.http1.server._STOP_SECONDS", 0.05)

    async def handler(request) -> None:
        await asyncio.Event().wait()

    async with serve(handler) as site:
        client = await site.connect()
        client.send(PLAIN)
        await wait_until(lambda: site.seen)
        await site.server.stop()
        assert await client.rest() == b""
        await wait_until(lambda: not site.server.connections)


def test_times_and_sizes_are_as_documented() -> None:
    limits = ConnectionLimits()
    assert (limits.head_bytes, limits.head_seconds) == (64 * KB, 60)
    assert (limits.body_bytes, limits.body_seconds) == (64 * KB, 30)
