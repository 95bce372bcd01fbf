"""A session that goes wrong in a way nobody thought of costs that session, not the worker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import grpc

from sapwood_common.network.channel import Dialer
from sapwood_net.pacing.loop_lag import LoopLag
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.connection import SilenceLimit, WorkerConnection
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker


@contextlib.asynccontextmanager
async def connected(session: Callable[..., AsyncIterator[bytes]]) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """A worker whose service answers as ``session`` does, and the task that keeps its session open."""
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(
        "sapwood.v1.Worker", {"Session": grpc.stream_stream_rpc_method_handler(session)}
    )
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    worker = Worker(f"127.0.0.1:{port}", CircuitBreaker(BreakerSettings(), time.monotonic), time.monotonic)
    connection = WorkerConnection(
        *(worker, Registry([worker]), 250, SilenceLimit(0.05, LoopLag())),
        *(lambda _: None, lambda _: None, time.monotonic, Dialer()),
    )
    task = asyncio.create_task(connection.run())
    try:
        yield worker, task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await server.stop(None)


async def test_a_worker_that_answers_nonsense_is_asked_again(wait_until) -> None:
    sessions = 0

    async def session(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        nonlocal sessions
        sessions += 1
        yield b"\xff\xff no SessionResponse"

    async with connected(session) as (worker, task):
        await wait_until(lambda: sessions >= 3 or task.done())
        assert not task.done()
        assert worker.problem is not None
        assert "DecodeError" in worker.problem
        assert not worker.available


async def test_a_worker_that_takes_the_call_and_says_nothing_is_asked_again(wait_until, monkeypatch) -> None:
    monkeypatch.setattr("sapwood_router.fleet.session.OPEN_TIMEOUT", 0.2)
    sessions = 0

    async def session(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        nonlocal sessions
        sessions += 1
        await asyncio.Event().wait()
        yield b""

    async with connected(session) as (worker, _):
        await wait_until(lambda: sessions >= 2)
        assert (worker.problem, worker.available, worker.session) == ("it does not answer", False, None)
        assert worker.breaker.state.value == "closed", "it never was up"
