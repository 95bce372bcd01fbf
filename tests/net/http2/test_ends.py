"""However a call ends, its handler ends, its callbacks run once, and nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from itertools import pairwise

import grpc
import pytest

from sapwood_common.status import rpc_status
from sapwood_net.http2.server.server import Http2Server
from sapwood_net.http2.server.turnstile import MOST_A_TURN
from sapwood_net.http2.wire import frames
from sapwood_net.sockets.port import Port

PATH = "/test.Test/"


@pytest.fixture
async def channel(running):
    async with grpc.aio.insecure_channel(running.address) as channel:
        yield channel


async def code(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


def open_call(client, request_block, method: str, stream: int, *more: tuple[str, str], body: bytes = b"") -> None:
    """Headers and, if there is a body, all of it, in one piece."""
    data = frames.header_frames(stream, request_block(method, *more), frames.USUAL_FRAME)
    client.send(data + frames.frame(frames.DATA, frames.END_STREAM, stream, body) if body else data)


async def test_a_client_that_cancels_while_the_handler_waits(running, channel, until) -> None:
    service = running.service
    for method, call in (
        ("Wait", channel.unary_unary(PATH + "Wait")(b"")),
        ("Listen", channel.stream_stream(PATH + "Listen")()),
    ):
        await until(lambda name=method: name in service.started)
        assert method not in service.finished
        call.cancel()
        await until(lambda name=method: name in service.finished)
    await until(lambda: service.called_back == 2)
    del call
    await until(lambda: running.live() == 1)  # only the connection is left


async def test_a_client_that_cancels_while_a_response_waits_for_its_window(running, until) -> None:
    async with grpc.aio.insecure_channel(running.address) as channel:
        call = channel.unary_stream(PATH + "Flood")(b"")
        await call.read()
        await stalled(running.service, until)
        call.cancel()
        await until(lambda: running.service.finished == ["Flood"])
        await until(lambda: running.service.called_back == 1)


async def stalled(service, until) -> None:
    """Returns once a handler writes no more."""
    before = -1

    def still() -> bool:
        nonlocal before
        same, before = before == service.written, service.written
        return same

    for _ in range(5):
        before = -1
        await until(still)


async def test_a_client_that_leaves_before_its_message(running, request_block, until) -> None:
    """No handler has begun; deadlines count all the same."""
    client = await running.connect()
    open_call(client, request_block, "Wait", 1)
    open_call(client, request_block, "Wait", 3, ("grpc-timeout", "1m"))
    open_call(client, request_block, "Wait", 5, ("grpc-timeout", "99999999H"))
    assert (await client.status(3))["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    client.send(frames.reset(1, 8) + frames.reset(5, 8))
    await client.ping()
    assert running.service.started == []
    await until(lambda: running.live() == 1)
    client.writer.close()


async def test_a_deadline_that_passes_cancels_the_handler(running, request_block, grpc_message, channel, until) -> None:
    await channel.unary_unary(PATH + "Echo")(b"")  # connects
    for seconds in (0.2, 2, 20):  # where the machine is slow, the first may pass before there is a handler
        assert await code(channel.unary_unary(PATH + "Wait")(b"", timeout=seconds)) is grpc.StatusCode.DEADLINE_EXCEEDED
        if running.service.started:
            break
    await until(lambda: running.service.finished == ["Wait"])
    for stream, milliseconds in ((1, "20m"), (3, "2000m"), (5, "20000m")):
        client = await running.connect()  # one that leaves it to the server
        open_call(client, request_block, "Wait", stream, ("grpc-timeout", milliseconds), body=grpc_message(b""))
        assert (await client.status(stream))["grpc-status"] == "4"
        client.writer.close()
        if len(running.service.started) == 2:
            break
    await until(lambda: running.service.finished == ["Wait", "Wait"])
    await until(lambda: running.service.called_back == 2)


async def test_a_deadline_that_passes_while_the_window_is_closed_frees_the_stream(
    running, request_block, grpc_message, until
) -> None:
    for milliseconds in ("20m", "2000m", "20000m"):  # where the machine is slow, as above
        client = await running.connect()
        client.send(frames.settings([(4, 0)]))
        open_call(client, request_block, "Flood", 1, ("grpc-timeout", milliseconds), body=grpc_message(b""))
        await client.until(frames.RST_STREAM, 1)
        if running.service.started:
            break
        client.writer.close()
    await until(lambda: running.service.finished == ["Flood"])
    await until(lambda: running.live() == 1)
    client.writer.close()


@pytest.mark.parametrize("way", ["close", "half-close", "reset", "break the protocol"])
async def test_a_connection_that_ends_ends_its_calls(running, request_block, grpc_message, until, way) -> None:
    """A call ends, too, whose client does not read what was sent to it."""
    other = await running.connect()
    client = await running.connect()
    client.send(frames.window_update(0, 1 << 30) + frames.settings([(4, 1 << 30)]))
    for stream, method in ((1, "Wait"), (3, "Listen"), (5, "Flood")):
        open_call(client, request_block, method, stream)
        client.send(frames.frame(frames.DATA, 0, stream, grpc_message(b"")))
    await until(lambda: len(running.service.started) == 3 and running.service.written)
    await stalled(running.service, until)
    match way:
        case "close":
            client.writer.close()
        case "half-close":
            client.writer.write_eof()
        case "reset":
            client.writer.transport.abort()
        case _:
            client.send(frames.frame(frames.PUSH_PROMISE, 0, 1))
    await until(lambda: sorted(running.service.finished) == ["Flood", "Listen", "Wait"])
    await until(lambda: running.service.called_back == 3)
    await until(lambda: running.live() == 1)  # only the other connection is left
    await other.ping()
    other.writer.close()
    client.writer.transport.abort()


async def test_a_slow_reader_holds_up_its_own_call_and_no_other(running, request_block, grpc_message, until) -> None:
    slow = await running.connect()
    slow.send(frames.window_update(0, 1 << 30) + frames.settings([(4, 1 << 30)]))
    open_call(slow, request_block, "Flood", 1, body=grpc_message(b""))
    await until(lambda: running.service.written)
    await stalled(running.service, until)
    assert running.service.written < 4096  # 16 MB, of which the sockets hold most
    async with grpc.aio.insecure_channel(running.address) as channel:
        assert await channel.unary_unary(PATH + "Echo")(b"a") == b"a"
    before = running.service.written
    while running.service.written < before + 100:  # it continues as the client reads on
        assert await slow.reader.read(1 << 20)
    slow.writer.transport.abort()
    await until(lambda: running.service.finished == ["Flood"])


async def test_calls_that_run_when_the_server_stops_have_their_time(serve) -> None:
    async with serve() as running, grpc.aio.insecure_channel(running.address) as channel:
        call = channel.unary_unary(PATH + "Wait")(b"late")
        while not running.service.started:
            await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(running.server.stop(60))
        assert await code(channel.unary_unary(PATH + "Echo")(b"")) is grpc.StatusCode.UNAVAILABLE
        running.service.release.set()
        assert await call == b"late"
        await stopping


async def test_calls_that_run_on_when_the_server_stops_are_unavailable(serve, until, request_block) -> None:
    async with serve() as running, grpc.aio.insecure_channel(running.address) as channel:
        calls = [channel.unary_unary(PATH + "Wait")(b""), channel.unary_stream(PATH + "Flood")(b"").read()]
        listen = channel.stream_stream(PATH + "Listen")()
        assert await listen.read() == b"hello"
        raw = await running.connect()
        open_call(raw, request_block, "Wait", 1)  # and never sends its message
        await raw.ping()
        await until(lambda: len(running.service.started) == 3)
        await calls.pop()
        await running.server.stop(0.01)
        assert sorted(running.service.finished) == ["Flood", "Listen", "Wait"]
        assert running.service.called_back == 3
        assert await code(calls[0]) is grpc.StatusCode.UNAVAILABLE
        assert await code(listen.read()) is grpc.StatusCode.UNAVAILABLE
        assert (await raw.status(1))["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
        await raw.closed()
        raw.writer.close()


async def test_a_connection_that_drains_refuses_new_streams_and_closes_after_the_last(make_wire, request_block) -> None:
    wire = make_wire()
    call = wire.open(1)
    wire.answers()
    wire.connection.close_gently()
    wire.send(frames.header_frames(3, request_block(), frames.USUAL_FRAME))
    goodbye, refused = wire.answers()
    assert (goodbye[0], goodbye[3]) == (frames.GOAWAY, bytes((0, 0, 0, 1)) + bytes(4))
    assert refused == (frames.RST_STREAM, 0, 3, (7).to_bytes(4, "big"))
    assert not wire.transport.closed
    call.stream.finish(frames.literal(b"grpc-status", b"0"))
    assert wire.transport.closed


async def test_calls_that_are_over_wait_for_no_collector_of_cycles(running, until) -> None:
    """The router runs Python's garbage collector seldom."""
    async with grpc.aio.insecure_channel(running.address) as channel:
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await channel.unary_unary(PATH + "Echo")(b"a", timeout=100)
                assert [r async for r in channel.unary_stream(PATH + "Repeat")(b"\3a")]
            waiting = [channel.unary_unary(PATH + "Wait")(b"", timeout=100) for _ in range(20)]
            await until(lambda: len(running.service.started) == 20)
            assert running.count() >= 20
            for call in waiting:
                call.cancel()
            await until(lambda: running.count() == 1)
        finally:
            gc.enable()


async def test_streams_that_open_and_leave_at_once_leave_nothing(running, request_block, until) -> None:
    client = await running.connect()
    for stream in range(1, 4001, 2):
        open_call(client, request_block, "Listen", stream)
        client.send(frames.reset(stream, 8))
    await client.ping()
    await until(lambda: running.live() == 1)
    assert sorted(running.service.started) == sorted(running.service.finished)
    client.writer.close()


async def test_a_handler_that_overhears_its_cancellation_ends_with_its_next_response() -> None:
    ended = asyncio.Event()

    async def stubborn(request, context):
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
                yield b"x"
        finally:
            ended.set()

    server = Http2Server(lambda _, handler: handler, 1 << 20, rpc_status)
    server.add_registered_method_handlers("test.Test", {"Stubborn": grpc.unary_stream_rpc_method_handler(stubborn)})
    port = await server.start(Port("127.0.0.1", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/test.Test/Stubborn")(b"")
        assert await call.read() == b"x"
        call.cancel()
        await asyncio.wait_for(ended.wait(), 60)
    await server.stop(0)


async def test_calls_that_are_reset_while_they_wait_for_their_turn_wait_no_more(
    running, request_block, grpc_message
) -> None:
    client = await running.connect()
    await client.ping()
    numbers = range(1, 1001, 2)
    block = request_block("Wait")
    data = frames.frame(frames.DATA, frames.END_STREAM, 0, grpc_message(b""))
    client.send(
        b"".join(
            frames.header_frames(number, block, frames.USUAL_FRAME) + data[:5] + number.to_bytes(4, "big") + data[9:]
            for number in numbers
        )
        + b"".join(frames.reset(number, 8) for number in numbers)
        + frames.frame(frames.PING, 0, 0, b"12345678")
    )
    await client.until(frames.PING)
    assert running.server.waiting == 0


async def test_of_calls_that_are_cancelled_together_a_few_end_in_each_turn(
    running, request_block, grpc_message, until
) -> None:
    """If all ended in one turn of the event loop, every other call would wait for them."""
    client, service, count = await running.connect(), running.service, 5 * MOST_A_TURN
    numbers = range(1, 2 * count, 2)
    for stream in numbers:
        open_call(client, request_block, "Wait", stream, body=grpc_message(b""))
    await until(lambda: len(service.started) == count)
    client.send(b"".join(frames.reset(stream, 8) for stream in numbers))
    ended = [0]
    while ended[-1] < count:
        await asyncio.sleep(0)
        ended.append(len(service.finished))
    assert max(after - before for before, after in pairwise(ended)) <= 2 * MOST_A_TURN
    await until(lambda: service.called_back == count)


async def test_calls_that_are_cancelled_before_their_turn_leave_nothing_for_the_collector(
    running, request_block, grpc_message, until
) -> None:
    """The collector would find thousands of them at once, and every other call would wait for tens of milliseconds."""
    client, numbers = await running.connect(), range(1, 10 * MOST_A_TURN, 2)
    gc.collect()
    gc.disable()
    try:
        block = request_block("Wait")
        calls = [
            frames.header_frames(stream, block, frames.USUAL_FRAME)
            + frames.frame(frames.DATA, frames.END_STREAM, stream, grpc_message(b""))
            for stream in numbers
        ]
        running.keep_waiting()
        client.send(b"".join(calls) + b"".join(frames.reset(stream, 8) for stream in numbers))
        await client.ping()
        await until(lambda: running.count() == 1)  # the connection
        assert running.service.started == []
    finally:
        gc.enable()


@pytest.mark.parametrize("breaks_a_rule", [False, True])
async def test_a_connection_leaves_nothing_for_the_collector(
    running, request_block, grpc_message, until, breaks_a_rule
) -> None:
    gc.collect()
    gc.disable()
    try:
        client = await running.connect()
        client.send(frames.header_frames(1, request_block("Echo"), frames.USUAL_FRAME))
        client.send(frames.frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"")))
        await client.status(1)
        (connection,) = (weakref.ref(each) for each in running.server.connections)
        if breaks_a_rule:
            client.send(frames.frame(frames.DATA, 0, 3, b"of no stream"))
        else:
            client.writer.transport.abort()
        await until(lambda: connection() is None)
    finally:
        gc.enable()
