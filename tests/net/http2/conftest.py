"""A server of raw bytes, clients that send what they like, and the loops that services and tests run on."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import hpack
import pytest
import uvloop

from sapwood_common.status import rpc_status
from sapwood_net.http2.server.call import ServerCall
from sapwood_net.http2.server.connection import ServerConnection
from sapwood_net.http2.server.gate import Gate
from sapwood_net.http2.server.limits.lifetime import Timeouts
from sapwood_net.http2.server.running_call import RunningCall
from sapwood_net.http2.server.server import Http2Server
from sapwood_net.http2.server.stream import ServerStream
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.http2.wire import frames
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.sockets.port import Port
from sapwood_net.sockets.tls import ServerTls
from sapwood_testing.http2.wire import SERVICE, Frame, Wire, message, request_block, split_frames

OURS = (ServerConnection, ServerStream, ServerCall, RunningCall)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test on both loops: services run on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class RawClient:
    """A client on a real socket that sends frames as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = hpack.Decoder()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def frame(self) -> Frame:
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    async def until(self, kind: int, stream: int | None = None) -> Frame:
        """The next frame of a kind; others are passed over."""
        while True:
            found = await self.frame()
            if found[0] == kind and stream in (None, found[2]):
                return found

    async def status(self, stream: int) -> dict[str, str]:
        """The trailers of a stream."""
        while True:
            _, flags, _, payload = await self.until(frames.HEADERS, stream)
            fields = dict(self.decoder.decode(payload))
            if flags & frames.END_STREAM:
                return cast(dict[str, str], fields)

    async def ping(self) -> None:
        """Sends a ping and returns once the server has answered it: it has then read all that was sent before."""
        self.send(frames.frame(frames.PING, 0, 0, b"12345678"))
        while (await self.until(frames.PING))[1] != frames.ACK:
            pass

    async def closed(self) -> None:
        """Returns once the server has closed the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


class Service:
    """Methods of all four kinds on bytes, and what became of their calls.

    Attributes:
        started: Methods called.
        finished: Methods whose ``finally`` ran.
        called_back: How often done callbacks ran.
        release: Lets ``Wait`` continue.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []
        self.called_back = 0
        self.metadata: Any = ()
        self.written = 0
        self.release = asyncio.Event()
        self.turn = 0
        """Number of the event loop's turn, where a test counts turns."""
        self.joined: Counter[int] = Counter()
        """Requests that ``Join`` read in each turn."""

    def handlers(self) -> dict[str, Any]:
        return {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "Repeat": grpc.unary_stream_rpc_method_handler(self.repeat),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
            "Wait": grpc.unary_unary_rpc_method_handler(self.wait),
            "Listen": grpc.stream_stream_rpc_method_handler(self.listen),
            "Flood": grpc.unary_stream_rpc_method_handler(self.flood),
            "Tell": grpc.unary_unary_rpc_method_handler(self.tell),
            "Crash": grpc.unary_unary_rpc_method_handler(self.crash),
        }

    def _begin(self, name: str, context: Any) -> None:
        self.started.append(name)
        context.add_done_callback(self._call_back)

    def _call_back(self, _: Any) -> None:
        self.called_back += 1

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.metadata = context.invocation_metadata()
        return request

    async def repeat(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for index in range(request[0]):
            yield request[1:] + bytes((index,))

    async def join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        parts = []
        async for request in requests:
            parts.append(request)
            self.joined[self.turn] += 1
        return b"".join(parts)

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def wait(self, request: bytes, context: Any) -> bytes:
        self._begin("Wait", context)
        try:
            await self.release.wait()
            return request
        finally:
            self.finished.append("Wait")

    async def listen(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self._begin("Listen", context)
        try:
            yield b"hello"
            async for request in requests:
                yield request
        finally:
            self.finished.append("Listen")

    async def flood(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self._begin("Flood", context)
        try:
            while True:
                yield bytes(4096)
                self.written += 1
        finally:
            self.finished.append("Flood")

    async def tell(self, request: bytes, context: Any) -> bytes:
        await context.send_initial_metadata((("first", "1"), ("first-bin", b"\0\xff")))
        context.set_trailing_metadata((("last", "2"), ("last-bin", b"\xfe")))
        context.set_code(grpc.StatusCode.DATA_LOSS)
        context.set_details(request.decode("utf-8", "surrogatepass"))
        return b"done"

    async def crash(self, request: bytes, context: Any) -> bytes:
        if request == b"trailers":
            context.set_trailing_metadata((("key", 5),))
        if request == b"callback":
            context.add_done_callback(lambda _: 1 / 0)
            return b"fine"
        raise ValueError("secret")


class Running:
    """A server and what it serves.

    Attributes:
        address: host:port.
    """

    def __init__(self, server: Http2Server, service: Service, port: int) -> None:
        self.server = server
        self.service = service
        self.port = port
        self.address = f"127.0.0.1:{port}"

    def count(self) -> int:
        """This server's connections, streams and calls, also those that nobody refers to any more."""
        return sum(type(item) in OURS and _server_of(item) is self.server for item in gc.get_objects())

    def live(self) -> int:
        """What :meth:`count` says after garbage was collected."""
        gc.collect()
        return self.count()

    def keep_waiting(self) -> Callable[[], None]:
        """Takes all turns, so that no call begins until the function that this returns is called."""
        turnstile, taken = self.server._turnstile, True

        def take(stranger: bool) -> None:
            if taken:
                turnstile.enter(partial(take, stranger), Rank(1, stranger=stranger))

        def let_go() -> None:
            nonlocal taken
            taken = False

        for stranger in (False, True):
            take(stranger)
        return let_go

    def busy_connections(self) -> list[ServerConnection]:
        """This server's connections that have calls."""
        return [connection for connection in self.server.connections if not connection.idle]

    async def connect(self, *, greet: bool = True, **options: Any) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        if greet:
            client.send(frames.PREFACE + frames.settings(()))
        return client


Serve = Callable[..., AbstractAsyncContextManager[Running]]


@asynccontextmanager
async def _serving(
    most_bytes: int = 1 << 20,
    tls: ServerTls | None = None,
    timeouts: Timeouts | None = None,
    gate: Gate | None = None,
    handshake: float = 10.0,
    memory: BodyMemory | None = None,
) -> AsyncIterator[Running]:
    timeouts = timeouts or Timeouts(held=0.05)
    server = Http2Server(lambda _, handler: handler, most_bytes, rpc_status, gate, timeouts, memory)
    service = Service()
    server.add_registered_method_handlers(SERVICE, service.handlers())
    port = Port("127.0.0.1", 0, tls, alpn=("h2",), handshake=handshake, held=timeouts.held)
    running = Running(server, service, await server.start(port))
    yield running
    await server.stop(0)
    await _until(lambda: not any(map(_is_servers, asyncio.all_tasks())))
    assert service.called_back == len(service.started), "callbacks run once"


@pytest.fixture
async def serve() -> Serve:
    """Starts a server; stops it, and sees to it that it leaves no task."""
    return _serving


@pytest.fixture
async def running(serve: Serve) -> AsyncIterator[Running]:
    """A server whose largest message is 1 MB."""
    async with serve() as started:
        yield started


@pytest.fixture(scope="session")
def make_wire() -> type[Wire]:
    """Makes connections on fake sockets."""
    return Wire


@pytest.fixture(scope="session", name="split_frames")
def _split_frames() -> Callable[[bytes], tuple[list[Frame], bytes]]:
    return split_frames


@pytest.fixture(scope="session", name="request_block")
def _request_block() -> Callable[..., bytes]:
    return request_block


@pytest.fixture(scope="session")
def grpc_message() -> Callable[..., bytes]:
    """A message with its prefix."""
    return message


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Waits for a condition."""
    return _until


def _server_of(item: Any) -> object:
    """The server of a connection, stream or call: other tests leave some of theirs in this process."""
    if isinstance(item, RunningCall):
        item = item._call
    if isinstance(item, ServerCall):
        item = item._stream
    if isinstance(item, ServerStream):
        item = item._connection
    return getattr(item, "owner", None)


def _is_servers(task: asyncio.Task[Any]) -> bool:
    """Whether a server started the task, and not a test or grpcio."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and Path(frames.__file__).parents[1] in Path(code.co_filename).parents


async def _until(condition: Callable[[], Any]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "what is waited for does not come"
        await asyncio.sleep(0.005)
