"""A server of the package by itself, and clients that write bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_router.edges.http1.host import ConnectionLimits
from sapwood_router.edges.http1.request import Request
from sapwood_router.edges.http1.server import HttpServer


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *rest = head[:-4].split("\r\n")
            headers = dict(each.split(": ", 1) for each in rest)
            body = b""
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readexactly(2)
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            return int(line.split()[1]), headers, body

    async def rest(self) -> bytes:
        """What comes until the server closes; nothing more where it resets."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
            return b""

    def abort(self) -> None:
        self.writer.transport.abort()


@dataclass
class Site:
    """A server whose handler says what it got, and the requests that it saw."""

    port: int
    server: HttpServer
    seen: list[Request] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    async def connect(self, receive_buffer: int | None = None) -> Client:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        client = Client(*await asyncio.open_connection(sock=sock))
        self.clients.append(client)
        return client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def wait_until() -> Callable:
    return until


@pytest.fixture
def serve() -> Callable:
    """Starts a server. ``handler`` has the site, too; without one, the answer is method, path and body."""

    @contextlib.asynccontextmanager
    async def start(handler: Callable | None = None, most_body: int = 1 << 20, **settings) -> AsyncIterator[Site]:
        async def echo(request: Request) -> None:
            body = await request.receive_body(most_body)
            about = f"{request.head.method} {request.head.path} ".encode()
            await request.respond(200, [], about + body)

        async def handle(request: Request) -> None:
            site.seen.append(request)
            await (handler or echo)(request)

        limits = {name: settings.pop(name) for name in ConnectionLimits.__annotations__ if name in settings}
        limits.setdefault("held_seconds", 0.05)
        settings = {"bodies": BodyMemory(1 << 24), "most_connections": 100, **settings}
        server = HttpServer(
            handle, "127.0.0.1", 0, lambda headers: Rank(), limits=ConnectionLimits(**limits), **settings
        )
        site = Site(await server.start(), server)
        try:
            yield site
        finally:
            for client in site.clients:
                client.abort()
            await server.stop()

    return start
