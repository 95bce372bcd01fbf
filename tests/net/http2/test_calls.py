"""Calls of grpcio's clients: all kinds of method, sizes, compression, metadata, statuses."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import struct
import tracemalloc
import zlib

import grpc
import pytest

from sapwood_net.http2.server.turnstile import MOST_A_TURN
from sapwood_net.http2.wire import frames
from sapwood_net.pacing.body_memory import BodyMemory

PATH = "/test.Test/"
LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture
async def channel(running):
    async with grpc.aio.insecure_channel(running.address) as channel:
        yield channel


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def stream(address: str, messages: list[bytes]) -> tuple[list[bytes], grpc.StatusCode]:
    received = []
    with grpc.insecure_channel(address, LARGE) as channel:
        call = channel.stream_stream(PATH + "Chat")(iter(messages))
        with contextlib.suppress(grpc.RpcError):
            received.extend(call)
        return received, call.code()


async def chunks(*items):
    for item in items:
        yield item


async def test_all_kinds_of_method(channel) -> None:
    assert await channel.unary_unary(PATH + "Echo")(b"a") == b"a"
    assert [r async for r in channel.unary_stream(PATH + "Repeat")(b"\x03a")] == [b"a\0", b"a\1", b"a\2"]
    assert await channel.stream_unary(PATH + "Join")(chunks(b"a", b"", b"b")) == b"ab"
    assert [r async for r in channel.stream_stream(PATH + "Chat")(chunks(b"a", b"", b"b"))] == [b"a", b"", b"b"]
    assert [r async for r in channel.unary_stream(PATH + "Repeat")(b"\0")] == []
    assert await channel.stream_unary(PATH + "Join")(chunks()) == b""


async def test_all_kinds_of_method_for_clients_without_an_event_loop(running) -> None:
    def use() -> None:
        with grpc.insecure_channel(running.address) as channel:
            for _ in range(3):
                assert channel.unary_unary(PATH + "Echo")(b"a") == b"a"
                assert list(channel.unary_stream(PATH + "Repeat")(b"\x02a")) == [b"a\0", b"a\1"]
                assert channel.stream_unary(PATH + "Join")(iter((b"a", b"b"))) == b"ab"
                assert list(channel.stream_stream(PATH + "Chat")(iter((b"a", b"b")))) == [b"a", b"b"]

    await asyncio.to_thread(use)


async def test_messages_of_all_sizes(serve) -> None:
    memory = BodyMemory(
        64 << 20
    )  # for a message that is read, its answer and the next one, however slow the client reads
    async with (
        serve(8 << 20, memory=memory) as running,
        grpc.aio.insecure_channel(running.address, LARGE) as channel,
    ):
        for size in (0, 1, 16_379, 16_380, 65_530, 5_000_000, 8 << 20):
            body = bytes(range(256)) * (size // 256) + bytes(size % 256)
            assert await channel.unary_unary(PATH + "Echo")(body) == body
            assert [r async for r in channel.stream_stream(PATH + "Chat")(chunks(body, b"", body))] == [body, b"", body]


async def test_a_message_too_large_is_refused_and_the_connection_stays(running, until) -> None:
    async with grpc.aio.insecure_channel(running.address, LARGE) as channel:
        echo = channel.unary_unary(PATH + "Echo")
        body = bytes(100 << 20)
        await echo(b"")
        tracemalloc.start()
        try:
            error = await failure(echo(body))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"({100 << 20} vs. {1 << 20})" in error.details()
        assert peak < 8 << 20
        # grpc.aio's streams take their own broken write for the server's status; those without an event loop do not.
        assert await asyncio.to_thread(stream, running.address, [b"a", bytes((1 << 20) + 1), b"b"]) == (
            [b"a"],
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        assert await echo(bytes(1 << 20)) == bytes(1 << 20)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests(running, compression) -> None:
    async with grpc.aio.insecure_channel(running.address, compression=compression) as channel:
        body = b"sapwood" * 10_000
        assert await channel.unary_unary(PATH + "Echo")(body) == body
        assert await channel.stream_unary(PATH + "Join")(chunks(body, b"x", body)) == body + b"x" + body


async def answer(client, request_block, body: bytes, encoding: str, stream: int) -> dict[str, str]:
    block = request_block("Echo", ("grpc-encoding", encoding))
    client.send(frames.header_frames(stream, block, frames.USUAL_FRAME))
    client.send(frames.frame(frames.DATA, frames.END_STREAM, stream, body))
    return await client.status(stream)


async def test_bombs_and_messages_that_are_not_compressed_as_they_say(running, request_block, grpc_message) -> None:
    client = await running.connect()
    bomb = grpc_message(gzip.compress(bytes((1 << 20) + 1)), True)
    cases = [
        (bomb, "gzip", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc_message(gzip.compress(bytes(1 << 20)), True), "gzip", grpc.StatusCode.OK),
        (grpc_message(b"no such thing", True), "gzip", grpc.StatusCode.INVALID_ARGUMENT),
        (grpc_message(zlib.compress(b"a"), True), "gzip", grpc.StatusCode.INVALID_ARGUMENT),
        (grpc_message(zlib.compress(b"a"), True), "deflate", grpc.StatusCode.OK),
        (grpc_message(zlib.compress(b"a"), True), "identity", grpc.StatusCode.INVALID_ARGUMENT),
        (grpc_message(b"plain"), "gzip", grpc.StatusCode.OK),
        (grpc_message(b"plain"), "brotli", grpc.StatusCode.UNIMPLEMENTED),
        (b"", "identity", grpc.StatusCode.INVALID_ARGUMENT),
    ]
    client.send(frames.window_update(0, 1 << 24) + frames.settings([(4, 1 << 24)]))
    for index, (body, encoding, code) in enumerate(cases):
        status = await answer(client, request_block, body, encoding, 2 * index + 1)
        assert status["grpc-status"] == str(code.value[0]), (encoding, status)
        assert ("grpc-accept-encoding" in status) == (encoding == "brotli")
    client.writer.close()


async def test_metadata_and_statuses(running, channel) -> None:
    sent = (("key", "a"), ("key", "b"), ("key-bin", bytes(range(256))), ("empty-bin", b""))
    await channel.unary_unary(PATH + "Echo")(b"", metadata=sent)
    assert [pair for pair in running.service.metadata if pair in sent] == list(sent)
    for details in ("", "plain", "Größe 100 % \u2013 \U0001f332\n\0"):
        call = channel.unary_unary(PATH + "Tell")(details.encode())
        error = await failure(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, details)
        assert set(error.initial_metadata()) == {("first", "1"), ("first-bin", b"\0\xff")}
        assert set(error.trailing_metadata()) == {("last", "2"), ("last-bin", b"\xfe")}
    error = await failure(channel.unary_unary(PATH + "Tell")(b"a\xed\xa0\x80b"))  # half a character
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "a?b")


async def test_metadata_too_large_ends_their_call_alone(running, channel, until) -> None:
    other = channel.unary_unary(PATH + "Wait")(b"other")
    await until(lambda: running.service.started)
    echo = channel.unary_unary(PATH + "Echo")
    assert await echo(b"a", metadata=(("key", "v" * 60_000),)) == b"a"
    error = await failure(echo(b"a", metadata=(("key", "v" * 70_000),)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    running.service.release.set()
    assert await other == b"other"


async def test_what_a_handler_does_wrong_ends_its_call_alone(running, channel) -> None:
    crash = channel.unary_unary(PATH + "Crash")
    for body in (b"", b"trailers"):
        error = await failure(crash(body))
        assert error.code() is grpc.StatusCode.UNKNOWN
        assert "secret" not in error.details()
    assert await crash(b"callback") == b"fine"
    assert (await failure(channel.unary_unary("/test.Test/Nothing")(b""))).code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await failure(channel.unary_unary("/Nothing/Echo")(b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_thousands_of_calls_at_once_on_one_connection(running, channel, until) -> None:
    wait = channel.unary_unary(PATH + "Wait")
    bodies = [struct.pack("i", index) for index in range(2000)]
    calls = [wait(body) for body in bodies]
    await until(lambda: len(running.service.started) == len(calls))
    assert await channel.unary_unary(PATH + "Echo")(b"between") == b"between"
    running.service.release.set()
    assert await asyncio.gather(*calls) == bodies
    assert running.service.called_back == len(calls)


async def test_requests_that_are_no_grpc_are_415_and_methods_but_post_405(running, request_block) -> None:
    client = await running.connect()
    plain = request_block().replace(b"application/grpc", b"application/json")
    head = request_block().replace(b"\x04POST", b"\x04HEAD")
    for stream, block, status in ((1, plain, "415"), (3, head, "405")):
        client.send(frames.header_frames(stream, block, frames.USUAL_FRAME))
        assert (await client.status(stream))[":status"] == status
    await client.ping()
    client.writer.close()


async def test_requests_that_are_there_already_are_read_a_few_in_a_turn_of_all_calls(
    running, request_block, grpc_message
) -> None:
    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            running.service.turn += 1

    client = await running.connect()
    calls = range(1, 41, 2)
    block, many = request_block("Join"), grpc_message(b"a") * 200
    data = [frames.header_frames(stream, block, frames.USUAL_FRAME) for stream in calls]
    data += [frames.frame(frames.DATA, frames.END_STREAM, stream, many) for stream in calls]
    counter = asyncio.create_task(count_turns())
    client.send(b"".join(data))
    ended = 0
    while ended < len(calls):
        kind, flags, _, _ = await client.frame()
        ended += kind == frames.HEADERS and flags & frames.END_STREAM != 0
    counter.cancel()
    assert sum(running.service.joined.values()) == 200 * len(calls)
    assert max(running.service.joined.values()) <= 4 * 8 * MOST_A_TURN  # calls that begin read some, too
