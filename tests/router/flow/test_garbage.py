"""A request that is over is let go at once: what waits for the garbage collector, which comes rarely, adds up to many MB."""

import asyncio
import gc
from collections.abc import Iterator

import grpc
import pytest

from sapwood.v1 import common_pb2, router_pb2
from sapwood_common.errors import InternalError
from sapwood_router.request.context import RequestContext

NAME = "let-go"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def kept() -> list[RequestContext]:
    return [item for item in gc.get_objects() if type(item) is RequestContext and item.request_id.startswith(NAME)]


def bodies() -> dict[str, dict]:
    ids = {"prompt": [5, 6, 7, 8], "detokenize": False}
    return {
        "text": {"prompt": "abcdef"},
        "text-stream": {"prompt": "abcdef", "stream": True},
        "ids": ids,
        "ids-stream": {**ids, "stream": True},
        "choices": {"prompt": ["abc", "def"], "n": 2, "seed": 1},
        "choices-stream": {"prompt": ["abc", "def"], "stream": True},
        "malformed": {"prompt": "abc", "max_tokens": -1},
        "stop": {"prompt": "abcdef", "stop": ["d"]},
    }


@pytest.mark.parametrize("kind", bodies())
async def test_over_http(cluster, no_collector, wait_until, kind: str) -> None:
    answer = await cluster.http.post("/v1/completions", json=bodies()[kind], headers={"x-request-id": f"{NAME}-{kind}"})
    assert answer.status_code == (400 if kind == "malformed" else 200)
    await cluster.idle()
    await wait_until(lambda: not kept())


async def test_over_grpc(cluster, no_collector, wait_until) -> None:
    for prompt in ({"text": "abcdef"}, {"tokens": common_pb2.TokenIds(ids=[5, 6, 7])}):
        request = router_pb2.RouterGenerateRequest(**prompt)
        async for _ in cluster.stub.Generate(request, metadata=(("x-request-id", f"{NAME}-grpc"),)):
            pass
    await cluster.idle()
    await wait_until(lambda: not kept())


async def test_one_that_its_workers_fail(cluster, no_collector, wait_until) -> None:
    for worker in cluster.workers:
        worker.script.fail_after, worker.script.error = 1, InternalError("broken")
    answer = await cluster.http.post(
        "/v1/completions", json={"prompt": "abcdef"}, headers={"x-request-id": f"{NAME}-fails"}
    )
    assert answer.status_code == 500
    request = router_pb2.RouterGenerateRequest(text="abcdef")
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in cluster.stub.Generate(request, metadata=(("x-request-id", f"{NAME}-grpc-fails"),)):
            pass
    await cluster.idle()
    await wait_until(lambda: not kept())


async def test_one_that_is_refused(make_cluster, no_collector, wait_until) -> None:
    async with make_cluster(1, requests_per_worker=1, queue_size=1) as cluster:
        gate = cluster.workers[0].script.gate = asyncio.Event()
        asked = [
            asyncio.ensure_future(
                cluster.http.post("/v1/completions", json={"prompt": "abcdef"}, headers={"x-request-id": f"{NAME}-{n}"})
            )
            for n in range(8)
        ]
        await wait_until(lambda: sum(task.done() for task in asked) == 6)
        gate.set()
        statuses = sorted([(await task).status_code for task in asked])
        assert statuses == [200, 200, *[429] * 6]
        await cluster.idle()
        await wait_until(lambda: not kept())


async def test_one_that_waits_for_the_tokenizer_and_is_refused(cluster, no_collector, wait_until, monkeypatch) -> None:
    monkeypatch.setattr("sapwood_router.tokenizer.client.LARGE", 4)  # all texts are long
    asked = [
        cluster.http.post("/v1/completions", json={"prompt": "abcdef"}, headers={"x-request-id": f"{NAME}-{n}"})
        for n in range(20)
    ]
    statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
    assert set(statuses) == {200, 429}

    async def ask_over_grpc(number: int) -> bool:
        request, name = router_pb2.RouterGenerateRequest(text="abcdef"), f"{NAME}-g{number}"
        try:
            async for _ in cluster.stub.Generate(request, metadata=(("x-request-id", name),)):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False

    assert any(await asyncio.gather(*map(ask_over_grpc, range(20))))
    await cluster.idle()
    await wait_until(lambda: not kept())
