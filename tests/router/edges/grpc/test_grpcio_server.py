"""The router on grpcio's server, which pushes its responses through a writer of its own."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from sapwood.v1 import router_pb2


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(2, grpc_server="grpcio") as running:
        yield running


async def test_an_answer_is_streamed_and_names_its_worker(cluster) -> None:
    call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="abc", request_id="r1"))
    responses = [response async for response in call]
    assert responses[-1].finish_reason
    assert dict(await call.trailing_metadata())["x-sapwood-worker"] in {
        cluster.id_of(worker) for worker in cluster.workers
    }
    assert ("x-request-id", "r1") in list(await call.initial_metadata())


async def test_many_at_once_are_all_answered(cluster) -> None:
    answers = await asyncio.gather(*(cluster.generate(f"abc {number}") for number in range(80)))
    assert all(responses[-1].finish_reason for responses in answers)
    await cluster.idle()


async def test_a_client_that_leaves_ends_its_request(cluster, wait_until) -> None:
    gate = asyncio.Event()
    for worker in cluster.workers:
        worker.script.gate = gate
    call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="abc"))
    reading = asyncio.ensure_future(call.read())
    await wait_until(lambda: bool(cluster.calls()))
    call.cancel()
    await cluster.idle()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await reading
