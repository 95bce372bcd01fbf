"""A client in another language: grpcurl, with reflection; and the health service that it asks."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import grpc
import hpack
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood_common.serving.server import ServiceServer
from sapwood_net.http2.wire import frames

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")


@pytest.fixture
async def server():
    server = ServiceServer("127.0.0.1", 0, [])
    port = await server.start()
    await server.set_serving(True)
    yield server, f"127.0.0.1:{port}"
    await server.stop()


async def test_health_is_watched(server) -> None:
    """A handler that writes by itself."""
    service, address = server
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await service.set_serving(False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await service.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_watcher_that_reads_nothing_does_not_hold_up_draining(server) -> None:
    """Its window (setting 4) is 0, so that not even the first answer leaves."""
    service, address = server
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/grpc.health.v1.Health/Watch"), (":authority", "x")]
    block = hpack.Encoder().encode([*fields, ("te", "trailers"), ("content-type", "application/grpc")])
    writer.write(frames.PREFACE + frames.settings(((4, 0),)))
    writer.write(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block))
    writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1, bytes(5)))
    kind = None
    while kind != frames.HEADERS:  # of the answer, whose DATA has to wait
        head = await asyncio.wait_for(reader.readexactly(9), 60)
        kind = head[3]
        await reader.readexactly(int.from_bytes(head[:3], "big"))
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True):
            told = asyncio.ensure_future(service.set_serving(serving))
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == (1 if serving else 2)
            assert told.done()
        assert await service.drain(60)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 2
    writer.close()


async def grpcurl(*arguments: str) -> tuple[int | None, str]:
    assert GRPCURL is not None
    process = await asyncio.create_subprocess_exec(
        GRPCURL, "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@pytest.mark.skipif(GRPCURL is None, reason="grpcurl is not installed")
async def test_grpcurl_lists_describes_and_calls(server) -> None:
    _, address = server
    code, listed = await grpcurl(address, "list")
    assert code == 0, listed
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= set(listed.split())
    (_, described), (_, answered), (_, refused) = await asyncio.gather(
        grpcurl(address, "describe", "grpc.health.v1.Health"),
        grpcurl(address, "grpc.health.v1.Health/Check"),
        grpcurl("-d", '{"service": "none"}', address, "grpc.health.v1.Health/Check"),
    )
    assert "rpc Watch" in described
    assert json.loads(answered) == {"status": health_pb2.HealthCheckResponse.ServingStatus.Name(1)}
    assert "NotFound" in refused
