from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood_common.serving.server import ServiceServer

SERVICE = "sapwood.v1.Router"
State = health_pb2.HealthCheckResponse


@pytest.fixture
async def running() -> AsyncIterator[tuple[ServiceServer, health_pb2_grpc.HealthStub]]:
    server = ServiceServer("127.0.0.1", 0, [SERVICE])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        yield server, health_pb2_grpc.HealthStub(channel)
    await server.stop()


async def test_list_tells_every_service_while_it_loads_serves_and_drains(running) -> None:
    server, health = running

    async def states() -> dict[str, int]:
        listed = await health.List(health_pb2.HealthListRequest())
        return {name: answer.status for name, answer in listed.statuses.items()}

    assert await states() == {"": State.NOT_SERVING, SERVICE: State.NOT_SERVING, "liveness": State.SERVING}
    await server.set_serving(True)
    assert await states() == {"": State.SERVING, SERVICE: State.SERVING, "liveness": State.SERVING}
    await server.drain(60)
    assert await states() == {"": State.NOT_SERVING, SERVICE: State.NOT_SERVING, "liveness": State.SERVING}


async def test_check_refuses_a_service_that_is_not_there_and_names_it(running) -> None:
    _, health = running
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="sapwood.v1.Nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'sapwood.v1.Nothing'" in caught.value.details()


async def test_watch_tells_each_change_once(running) -> None:
    server, health = running
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="sapwood.v1.Nothing"))
    assert (await unknown.read()).status == State.SERVICE_UNKNOWN
    assert (await watch.read()).status == State.NOT_SERVING
    await server.set_serving(False)
    for serving in (True, False, True):
        await server.set_serving(serving)
        assert (await watch.read()).status == (State.SERVING if serving else State.NOT_SERVING)
    watch.cancel()
    unknown.cancel()
