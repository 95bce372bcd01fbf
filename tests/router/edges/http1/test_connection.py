"""What one connection may hold and hold up, how it ends, and what a client that leaves, waits or says nothing does."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from sapwood_common.errors import RequestCancelledError, SapwoodError, UnavailableError
from sapwood_common.pacing.body_memory import BodyMemory
from sapwood_router.edges.http1 import connection as connection_module
from sapwood_router.edges.http1 import held_bytes
from sapwood_router.edges.http1.body import Body
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.http1.host import ConnectionLimits
from sapwood_router.edges.http1.server import KEEP_ALIVE

GET = b"GET /a HTTP/1.1\r\nHost: a\r\n"
PLAIN = GET + b"\r\n"
KB, MB = 1024, 1024 * 1024


def post(length: int, headers: bytes = b"") -> bytes:
    return b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n" % (length, headers)


async def wait_and_tell(request) -> None:
    """A handler that reads the body, and tells the client why it cannot."""
    try:
        body = await request.receive_body(1 << 20)
    except (HttpError, UnavailableError) as error:
        await request.respond(503 if isinstance(error, UnavailableError) else error.status, [])
    except RequestCancelledError:
        return
    else:
        await request.respond(200, [], b"%d" % len(body))


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


async def test_a_body_nobody_asks_for_is_read_on_if_it_is_small_and_closes_the_connection_if_it_is_not(serve) -> None:
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


async def test_a_client_that_leaves_is_noticed_while_it_is_being_answered_and_while_it_sends(serve, wait_until) -> None:
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


async def test_an_answer_of_unknown_length_ends_with_the_connection_for_who_knows_no_chunks(serve) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], b"a", chunked=True, last=False)
        request.write_chunk(b"b")
        assert request.number_writer(b"<", b">")(12)
        await request.send(b"c", last=True)

    async with serve(handler) as site:
        client = await site.connect()
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"ab<12>c"
        client = await site.connect()
        client.send(PLAIN, PLAIN)
        for _ in range(2):
            assert (await client.answer())[2] == b"ab<12>c"


async def test_head_is_answered_without_a_body(serve) -> None:
    async def handler(request) -> None:
        await request.respond(200, [], b"hello", chunked=request.head.path == "/chunked", last=True)

    async with serve(handler) as site:
        client = await site.connect()
        client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", b"HEAD /chunked HTTP/1.1\r\nHost: a\r\n\r\n", PLAIN)
        assert b"content-length: 5\r\n" in await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked\r\n" in await client.reader.readuntil(b"\r\n\r\n")
        assert (await client.answer())[2] == b"hello"


async def test_a_handler_that_fails_is_answered_for_and_one_that_stops_midway_ends_the_connection(serve) -> None:
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


async def test_who_sends_no_request_or_sends_on_after_its_last_one_waits_for_the_end_of_its_connection(
    serve, wait_until
) -> None:
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


async def test_who_sends_on_without_an_end_after_its_last_answer_waits_for_the_end_of_its_connection(
    serve, wait_until
) -> None:
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
        small.send(b"GET /small HTTP/1.1\r\nhost: x\r\n\r\n")
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
        request = b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"a" * 20 * KB + b"\r\n\r\n"
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
            client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size, b"a" * size)
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
            client.send(b"GET /much HTTP/1.1\r\nhost: x\r\n%b\r\n" % ends)
        modest = await site.connect()
        await wait_until(lambda: len(failed) == 2)  # each counts a quarter of all memory
        assert bodies.held == bodies.most
        modest.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await modest.answer())[2] == b"little"
        for client in slow:
            client.writer.transport.resume_reading()
        whole = 0
        for client in slow:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                whole += (await client.answer())[2] == answer
        assert whole == 4
    await wait_until(lambda: bodies.held == 0)
