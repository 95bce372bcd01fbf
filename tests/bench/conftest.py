"""A real router over fake tokenizer and workers, in the test's event loop; and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.fake_worker import FakeWorker


@dataclass
class Served:
    """Where the router answers, and the workers behind it."""

    url: str
    grpc: str
    workers: list[FakeWorker]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A router with two workers, each of which answers a prompt of bytes with the same bytes."""
    tokenizer, workers = FakeTokenizer(), [FakeWorker(), FakeWorker()]
    for service in (tokenizer, *workers):
        await service.start()
    # On a machine that is short of time, a worker in this very process is easily silent for a second.
    config = RouterConfig(
        port=0,
        http_port=0,
        tokenizer=tokenizer.address,
        workers=tuple(worker.address for worker in workers),
        worker_silence=60,
        tokenizer_grace=60,
        queue_wait=120,
    )
    router = RouterApplication(config, make_parser=tokenizer.make_parser)
    await router.start()
    try:
        async with asyncio.timeout(60):
            while router.problem() is not None or not all(worker.available for worker in router.registry.all()):
                await asyncio.sleep(0.01)
        yield Served(f"http://127.0.0.1:{router.http_port}", f"127.0.0.1:{router.grpc_port}", workers)
    finally:
        await router.stop()
        for worker in workers:
            await worker.kill()
        await tokenizer.kill()


Handler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def raw_server() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts servers that speak HTTP as a test likes; gives their URLs. A handler gets a request, head and body,
    and its connection."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler, context: ssl.SSLContext | None = None) -> str:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = next(
                        (
                            int(line.split(b":")[1])
                            for line in head.lower().split(b"\r\n")
                            if line.startswith(b"content-length:")
                        ),
                        0,
                    )
                    await handler(head + await reader.readexactly(length), reader, writer)
                except (ConnectionError, asyncio.IncompleteReadError):
                    pass
                finally:
                    writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
            stack.callback(server.close)
            return f"http{'s' if context else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        yield start


@pytest.fixture
def sapwood() -> Callable[..., Awaitable[tuple[int, str, str]]]:
    """Runs the command as a process of its own: its exit code, standard output and standard error."""

    async def run(*arguments: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "sapwood.cli.main", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    return run
