"""Channels to peers that are slow, away, or back."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood_common.network.channel import open_channel
from sapwood_common.serving.server import ServiceServer
from sapwood_testing.ports import port_of_its_own


@contextlib.asynccontextmanager
async def serving(port: int = 0):
    server = ServiceServer("127.0.0.1", port, [])
    chosen = await server.start()
    await server.set_serving(True)
    try:
        yield chosen
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def slow_door(port: int, seconds: float):
    """A port at which each connection is through to ``port`` only after a while, as a busy server's is."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, onward_writer), pump(onward_reader, writer))

    door = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield door.sockets[0].getsockname()[1]
    finally:
        door.close()


async def status_at(channel: grpc.aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    return answer.status


async def test_a_server_that_is_slow_to_greet_is_waited_for() -> None:
    async with serving() as port, slow_door(port, 0.6) as door, open_channel(f"127.0.0.1:{door}") as channel:
        assert await status_at(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_a_server_that_was_away_is_found_again() -> None:
    port = port_of_its_own()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        try:
            await status_at(channel)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        else:
            raise AssertionError("nobody was there")
        async with serving(port), asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await status_at(channel) == health_pb2.HealthCheckResponse.SERVING
                    break
                await asyncio.sleep(0.05)
