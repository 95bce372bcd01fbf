"""What one connection may hold and hold up: requests in a row, heads, bodies, and how each is answered."""

from __future__ import annotations

import asyncio

import pytest

from sapwood_common.errors import RequestCancelledError
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_testing.router.http1_requests import GET, KB, PLAIN, post, wait_and_tell


async def test_requests_sent_at_once_are_answered_in_order_and_one_is_looked_at_at_a_time(serve, wait_until) -> None:
    gate, running = asyncio.Event(), 0

    async def handler(request) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await gate.wait()
        await request.respond(200, [], request.head.path.encode() + await request.receive_body(100))
        running -= 1

    async with serve(handler) as site:
        client = await site.connect()
        sent = [f"/{number}".encode() for number in range(300)]
        for path in sent:
            client.send(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nxyz" % path)
        await wait_until(lambda: site.seen)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(site.seen) == 1
        gate.set()
        assert [(await client.answer())[2] for _ in sent] == [path + b"xyz" for path in sent]


async def test_of_what_is_sent_ahead_little_is_read_until_its_turn(serve, wait_until) -> None:
    gate = asyncio.Event()

    async def handler(request) -> None:
        await gate.wait()
        await request.respond(200, [])

    async with serve(handler) as site:
        client = await site.connect()
        count = 8_000
        client.send(PLAIN * count)
        await wait_until(lambda: site.seen)
        [connection] = site.server.connections
        await wait_until(lambda: not connection.transport.is_reading())
        assert len(connection._data) <= 128 * KB
        assert len(site.seen) == 1
        gate.set()
        for _ in range(count):
            await client.reader.readuntil(b"\r\n\r\n")
        assert len(site.seen) == count


async def test_a_client_that_reads_no_answers_is_given_no_more(serve, wait_until) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], bytes(100 * KB))

    async with serve(handler) as site:
        client = await site.connect(receive_buffer=4 * KB)
        client.writer.transport.pause_reading()
        count = 200
        client.send(PLAIN * count)
        await wait_until(lambda: site.seen)
        [connection] = site.server.connections
        await wait_until(lambda: connection.write_paused)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(site.seen) < count // 2
        client.writer.transport.resume_reading()
        for _ in range(count):
            assert len((await client.answer())[2]) == 100 * KB


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_head_is_64_kib_at_most(serve, at_once) -> None:
    async with serve() as site:
        for length, status in ((64 * KB, 200), (64 * KB + 1, 431), (70 * KB, 431)):
            client = await site.connect()
            field = b"A: " + b"a" * (length - len(PLAIN) - len(b"A: \r\n")) + b"\r\n"
            head = GET + field + b"\r\n"
            assert len(head) == length
            for start in range(0, length, length if at_once else 5000):
                client.send(head[start : start + (length if at_once else 5000)])
                await client.writer.drain()
            assert (await client.answer())[0] == status


async def test_an_unwanted_body_is_read_if_small_and_closes_the_connection_if_large(serve) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], b"x")

    async with serve(handler) as site:
        client = await site.connect()
        client.send(post(60 * KB, b"A: b\r\n"))
        status, headers, _ = await client.answer()
        assert (status, "connection" in headers) == (200, False)
        client.send(bytes(60 * KB), PLAIN)
        assert (await client.answer())[0] == 200
        client.send(post(80 * KB))
        assert (await client.answer())[1]["connection"] == "close"
        client.send(bytes(80 * KB), PLAIN)
        assert await client.rest() == b""
        assert len(site.seen) == 3


async def test_of_a_body_nobody_asks_for_yet_little_is_read(serve, wait_until) -> None:
    gate = asyncio.Event()

    async def handler(request) -> None:
        await gate.wait()
        await wait_and_tell(request)

    async with serve(handler) as site:
        client = await site.connect()
        client.send(post(1000 * KB), bytes(1000 * KB), PLAIN)
        await wait_until(lambda: site.seen)
        [connection] = site.server.connections
        await wait_until(lambda: not connection.transport.is_reading())
        assert site.seen[0].body.size + len(connection._data) < 256 * KB
        gate.set()
        assert (await client.answer())[2] == b"%d" % (1000 * KB)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_and_the_answer_arrives(serve, chunked) -> None:
    async with serve(wait_and_tell) as site:
        client = await site.connect()
        size = (1 << 20) + 1
        if chunked:
            client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % size)
        else:
            client.send(post(size))
        client.send(bytes(size))
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert await client.rest() == b""


async def test_a_body_that_comes_too_slowly_is_refused(serve) -> None:
    async with serve(wait_and_tell, body_seconds=0.05, body_bytes=10) as site:
        client = await site.connect()
        client.send(post(1000), b"only some")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert site.server.bodies.held == 0


async def test_a_body_that_comes_fast_enough_may_take_its_time(serve, wait_until) -> None:
    async with serve(wait_and_tell, body_seconds=3600, body_bytes=1) as site:
        client = await site.connect()
        client.send(post(10))
        await wait_until(lambda: site.seen)
        [connection] = site.server.connections
        for size in range(1, 10):
            client.send(b"x")
            await wait_until(lambda size=size: site.seen[0].body.size == size)
            timer = connection._timer._handle
            timer._run()  # an hour has passed
            timer.cancel()
        client.send(b"x")
        assert (await client.answer())[2] == b"10"


async def test_of_unfinished_bodies_the_largest_is_refused_when_they_are_too_much_together(serve, wait_until) -> None:
    async with serve(wait_and_tell, bodies=BodyMemory(300 * KB)) as site:
        clients = [await site.connect() for _ in range(4)]
        for client, size in zip(clients, (10, 90, 200, 20), strict=True):
            client.send(post(500 * KB), bytes(size * KB))
            await wait_until(lambda size=size: site.seen and site.seen[-1].body.size == size * KB)
        status, headers, _ = await clients[2].answer()
        assert (status, headers["connection"]) == (503, "close")
        await wait_until(lambda: site.server.bodies.held == 120 * KB)
        small = await site.connect()
        small.send(post(50 * KB), bytes(50 * KB))
        assert (await small.answer())[0] == 200
        for client, size in zip(clients, (10, 90, 200, 20), strict=True):
            if client is not clients[2]:
                client.send(bytes((500 - size) * KB))
                assert (await client.answer())[0] in (200, 503)
        assert site.server.bodies.held == 0


async def test_a_leaving_client_is_noticed_during_its_answer_and_its_request(serve, wait_until) -> None:
    left = []

    async def handler(request) -> None:
        request.watch(lambda: left.append(request.head.method))
        if request.head.method == "POST":
            with pytest.raises(RequestCancelledError):
                await request.receive_body(1000)
            return
        await asyncio.Event().wait()

    async with serve(handler) as site:
        for sent in (PLAIN, PLAIN + PLAIN, post(100) + b"some"):
            client, count = await site.connect(), len(left) + 1
            client.send(sent)
            await wait_until(lambda count=count: len(site.seen) == count)
            client.abort()
            await wait_until(lambda count=count: len(left) == count)
        assert left == ["GET", "GET", "POST"]
        assert not site.server.connections
        for task in tuple(site.server._tasks):
            task.cancel()


async def test_who_waits_to_be_invited_is_and_who_is_refused_is_not(serve) -> None:
    async with serve(wait_and_tell) as site:
        client = await site.connect()
        client.send(post(5, b"Expect: 100-continue\r\n"))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"hello")
        assert (await client.answer())[2] == b"5"
        client.send(post(1 << 21, b"Expect: 100-continue\r\n"))
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (413, "close")


async def test_connections_stay_open_or_close_as_the_client_asks(serve) -> None:
    old = b"GET /a HTTP/1.0\r\n"
    async with serve() as site:
        client = await site.connect()
        client.send(old, b"Connection: Keep-Alive\r\n\r\n")
        status, headers, body = await client.answer()
        assert (status, headers["connection"], body) == (200, "keep-alive", b"GET /a ")
        client.send(old, b"\r\n")
        assert (await client.answer())[1]["connection"] == "close"
        assert await client.rest() == b""
        client = await site.connect()
        client.send(GET, b"Connection: close\r\n\r\n", PLAIN)
        assert (await client.answer())[1]["connection"] == "close"
        assert await client.rest() == b""


async def test_without_chunks_an_answer_of_unknown_length_ends_with_the_connection(serve) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], b"a", chunked=True, last=False)
        request.write_chunk(b"b")
        await request.send(b"c", last=True)

    async with serve(handler) as site:
        client = await site.connect()
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"abc"
        client = await site.connect()
        client.send(PLAIN, PLAIN)
        for _ in range(2):
            assert (await client.answer())[2] == b"abc"


async def test_head_is_answered_without_a_body(serve) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], b"hello", chunked=request.head.path == "/chunked", last=True)

    async with serve(handler) as site:
        client = await site.connect()
        client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", b"HEAD /chunked HTTP/1.1\r\nHost: a\r\n\r\n", PLAIN)
        assert b"content-length: 5\r\n" in await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked\r\n" in await client.reader.readuntil(b"\r\n\r\n")
        assert (await client.answer())[2] == b"hello"


async def test_a_failing_handler_is_answered_for_and_a_stopped_one_ends_the_connection(serve) -> None:
    async def handler(request) -> None:
        if request.head.method == "POST":
            await request.respond(200, [], b"a", chunked=True, last=False)
        if request.head.path == "/b":
            raise RuntimeError("broken")

    async with serve(handler) as site:
        client = await site.connect()
        client.send(PLAIN)
        assert (await client.answer())[0] == 500
        client.send(post(0))
        with pytest.raises((ValueError, asyncio.IncompleteReadError, ConnectionError)):  # no next chunk
            await client.answer()
