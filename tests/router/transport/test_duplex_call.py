"""The call that the event loop carries itself, against servers of grpcio's."""

import asyncio
import contextlib
import os

import grpc
import pytest
from hyperframe.frame import PingFrame, SettingsFrame, WindowUpdateFrame

from sapwood_common.network.channel import Dialer
from sapwood_net.http2.client.duplex_call import CallEndedError
from sapwood_router.transport.shared_call import open_call

METHOD = "/test.Service/Call"
MOST = 8 * 1024 * 1024


@contextlib.asynccontextmanager
async def serving(handler, address: str = "127.0.0.1:0"):
    """A server whose one method is the given handler of byte strings; gives the target."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MOST), ("grpc.max_send_message_length", -1)])
    method = grpc.stream_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", {"Call": method})])
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(target: str, method: str = METHOD, most_bytes: int = MOST):
    return await open_call(target, method, Dialer(), 60, most_bytes)


async def echo(requests, context):
    async for request in requests:
        yield request


async def collect(opened, count: int) -> list[bytes]:
    found: list[bytes] = []
    complete = asyncio.Event()

    def take(message: bytes) -> None:
        found.append(message)
        if len(found) == count:
            complete.set()

    opened.follow(take, lambda: None)
    done, ended = asyncio.ensure_future(complete.wait()), asyncio.ensure_future(opened.wait_ended())
    await asyncio.wait({done, ended}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert not ended.done(), ended.result()
    ended.cancel()
    return found


@pytest.mark.parametrize("prefix", ["", "dns:///", "ipv4:"])
async def test_messages_go_both_ways_in_order(prefix) -> None:
    async with serving(echo) as target:
        opened = await call(prefix + target)
        sent = [bytes([number]) * number for number in range(200)]
        for message in sent:
            opened.write(message)
        assert await opened.read() == sent[0]
        assert await collect(opened, 199) == sent[1:]
        opened.close()
        assert (await opened.wait_ended()).code is grpc.StatusCode.CANCELLED


async def test_messages_larger_than_frames_and_windows_pass_whole() -> None:
    async with serving(echo) as target:
        opened = await call(target)
        sent = [os.urandom(size) for size in (3_000_000, 5, 70_000, 0, 4_000_000)]
        for message in sent:
            opened.write(message)
        assert not opened.ready, "four megabytes do not fit into a window"
        assert await collect(opened, 5) == sent
        assert opened.ready
        opened.close()


async def test_windows_are_opened_again_as_messages_are_taken() -> None:
    async with serving(echo) as target:
        opened = await call(target)
        message = os.urandom(4_000_000)
        for _ in range(10):  # more than twice the window
            opened.write(message)
            assert await opened.read() == message
        opened.close()


async def test_what_is_busy_says_when_it_is_ready_again() -> None:
    async with serving(echo) as target:
        opened = await call(target)
        ready = asyncio.Event()
        opened.follow(lambda message: None, ready.set)
        opened.write(bytes(6_000_000))
        assert not opened.ready
        async with asyncio.timeout(60):
            await ready.wait()
        assert opened.ready
        opened.close()


async def test_a_call_ends_with_the_services_status_after_its_last_message() -> None:
    async def refuse(requests, context):
        yield b"last"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "zu viel für uns, 100 %")

    async with serving(refuse) as target:
        opened = await call(target)
        assert await opened.read() == b"last"
        with pytest.raises(CallEndedError, match="RESOURCE_EXHAUSTED: zu viel für uns, 100 %"):
            await opened.read()
        assert opened.ended
        opened.write(b"into the void")


@pytest.mark.parametrize(
    ("method", "code"), [("/test.Service/Other", grpc.StatusCode.UNIMPLEMENTED), (METHOD, grpc.StatusCode.OK)]
)
async def test_an_end_without_a_message_is_told_too(method, code) -> None:
    async def nothing(requests, context):
        return
        yield

    async with serving(nothing) as target:
        with pytest.raises(CallEndedError) as ended:
            await (await call(target, method)).read()
        assert ended.value.code is code


async def test_a_server_that_stops_ends_the_call() -> None:
    async with serving(echo) as target:
        opened = await call(target)
        opened.write(b"x")
        await opened.read()
    assert (await opened.wait_ended()).code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_server_that_stops_gracefully_says_what_it_has_to_say_first() -> None:
    stopping = asyncio.Event()

    async def last_words(requests, context):
        yield b"begun"
        await stopping.wait()
        await asyncio.sleep(0.2)  # its GOAWAY is out
        yield b"more"
        async for request in requests:
            yield request
            return

    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(last_words)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", {"Call": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = await call(f"127.0.0.1:{port}")
    assert await opened.read() == b"begun"
    stopped = asyncio.ensure_future(server.stop(60))
    stopping.set()
    assert await opened.read() == b"more"
    opened.write(b"and the very last")
    assert await opened.read() == b"and the very last"
    assert (await opened.wait_ended()).code is grpc.StatusCode.OK
    await stopped


async def test_closing_cancels_it_at_the_service() -> None:
    cancelled = asyncio.Event()

    async def hang(requests, context):
        try:
            yield b"begun"
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(hang) as target:
        opened = await call(target)
        await opened.read()
        opened.close()
        opened.close()
        async with asyncio.timeout(60):
            await cancelled.wait()


async def test_closing_waits_for_no_peer_that_reads_nothing() -> None:
    closed, received = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def greet(reader, writer):
        wide = SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 2**30})
        writer.write(wide.serialize() + WindowUpdateFrame(0, 2**30).serialize())
        await closed.wait()
        total = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                total += len(data)
        received.set_result(total)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        opened = await call(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        opened.write(bytes(50_000_000))
        assert not opened.ready
        opened.close()
        await asyncio.sleep(0)
        closed.set()
        async with asyncio.timeout(60):
            assert await received < 50_000_000


async def test_a_ping_is_answered_and_an_answer_to_none_is_not() -> None:
    answer = PingFrame(0, b"12345678", flags=["ACK"]).serialize()
    answered = asyncio.Event()

    async def greet(reader, writer):
        acknowledgement = PingFrame(0, b"abcdefgh", flags=["ACK"])
        writer.write(SettingsFrame(0).serialize() + acknowledgement.serialize() + PingFrame(0, b"12345678").serialize())
        received = b""
        while answer not in received:
            received += await reader.readexactly(1)
        assert b"abcdefgh" not in received
        answered.set()
        writer.write(PingFrame(0, b"12345678").serialize().replace(b"\x00\x00\x08", b"\x00\x00\x07", 1)[:-1])
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server, asyncio.timeout(60):
        opened = await call(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await answered.wait()
        assert (await opened.wait_ended()).code is grpc.StatusCode.INTERNAL


async def test_a_message_that_is_too_large_ends_it() -> None:
    async with serving(echo) as target:
        opened = await call(target, most_bytes=1000)
        opened.write(bytes(1001))
        with pytest.raises(CallEndedError, match="too large"):
            await opened.read()


async def test_a_peer_that_speaks_something_else_ends_it() -> None:
    async def answer(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CallEndedError, match="more bytes than allowed"):
            await (await call(f"127.0.0.1:{port}")).read()


@pytest.mark.parametrize("target", ["127.0.0.1:1", "no port", "127.0.0.1:no", "host.invalid:80"])
async def test_no_connection_is_unavailable(target) -> None:
    with pytest.raises(CallEndedError, match="UNAVAILABLE"):
        await call(target)


async def test_a_unix_socket_is_a_target_too(tmp_path) -> None:
    address = f"unix:{tmp_path}/s"
    async with serving(echo, address):
        opened = await call(address)
        opened.write(b"hello")
        assert await opened.read() == b"hello"
        opened.close()
