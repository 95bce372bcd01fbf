"""Where workers are is for operators, and backends' credentials are for nobody."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from typing import Any

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common.errors import InternalError, InvalidArgumentError, UnavailableError
from sapwood_router.config import RouterConfig
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.fleet.sources.membership import read_addresses
from sapwood_router.transport.backend.spec import backend_at, parse_backend
from sapwood_testing.router.hostile_backend import HostileBackend, reply

BODY = {"prompt": [3, 4], "max_tokens": 3}


def test_errors_of_services_show_ids_for_addresses_and_errors_of_requests_stay() -> None:
    names = WorkerNames(b"key", lambda address: address in ("worker-0.svc:50061", "http://a:8000#m"))
    worker, backend = names.id_of("worker-0.svc:50061"), names.id_of("http://a:8000#m")
    gone = names.id_of("10.0.0.7:50061")
    assert re.fullmatch("w-[0-9a-f]{10}", worker)
    assert names.id_of("-") == "-"
    assert WorkerNames(b"other").id_of("worker-0.svc:50061") != worker
    for said, told in (
        ("worker worker-0.svc:50061 is not connected", f"worker {worker} is not connected"),
        ("backend http://a:8000#m: it fell silent", f"backend {backend}: it fell silent"),
        ("last error: UNKNOWN: ipv4:10.0.0.7:50061: refused", f"last error: UNKNOWN: {gone}: refused"),
        ("worker 10.0.0.7:50061 is gone: 10.0.0.8.", f"worker {gone} is gone: (address)."),
        (
            "cannot reach [fd00::7]:50061, http://b/v1 and unix:/tmp/s:3",
            f"cannot reach {names.id_of('[fd00::7]:50061')}, (address) and (address)",
        ),
        ("took 12:30 of qwen3:27", "took 12:30 of qwen3:27"),
    ):
        for kind in (UnavailableError, InternalError):
            assert names.for_client(kind(said, retry_after=2)).message == told
        assert names.for_client(InvalidArgumentError(said, field="x")).message == said
    error = names.for_client(UnavailableError("10.0.0.7:1 is gone", field="f", retry_after=2))
    assert (type(error), error.field, error.retry_after, str(error)) == (UnavailableError, "f", 2, error.message)


async def test_clients_get_a_workers_id_and_operators_both(cluster: Any) -> None:
    ids = {cluster.id_of(worker): worker.address for worker in cluster.workers}
    told = (await cluster.http.post("/v1/completions", json=BODY)).headers["x-sapwood-worker"]
    assert told in ids
    call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="a"))
    assert [response async for response in call]
    assert dict(await call.trailing_metadata())["x-sapwood-worker"] in ids
    opened = (await cluster.http.post("/v1/sessions", json={})).json()["id"]
    asked = router_pb2.RouterGenerateRequest(text="a", session=opened)
    assert [response async for response in cluster.stub.Generate(asked)]
    assert (await cluster.http.get(f"/v1/sessions/{opened}")).json()["worker"] in ids
    session = (await cluster.stub.GetSession(router_pb2.GetSessionRequest(id=opened))).session
    assert session.worker in ids
    status = await cluster.stub.GetStatus(router_pb2.GetStatusRequest())
    assert {worker.id: worker.address for worker in status.workers} == ids
    listed = await cluster.stub.ListWorkers(router_pb2.ListWorkersRequest())
    assert {worker.id: worker.address for worker in listed.workers} == ids
    page = (await cluster.http.get("/status")).text
    assert all(name in page and address in page for name, address in ids.items())


async def test_no_error_names_an_address(make_cluster: Any, wait_until: Any) -> None:
    async with make_cluster(workers=1, retry_attempts=1, resume_grace=0.0, queue_wait=0.5) as cluster:
        lost = cluster.workers[0]
        gate = asyncio.Event()
        lost.script.gate, lost.script.gate_after = gate, 1
        asked = asyncio.ensure_future(cluster.http.post("/v1/completions", json=BODY))
        called = asyncio.ensure_future(cluster.generate("a", timeout=60))
        await wait_until(lambda: len(lost.calls) == 2)
        await lost.kill()
        gate.set()
        answers = [
            await asked,
            await cluster.http.post("/v1/completions", json=BODY),
            await cluster.http.get("/health"),
        ]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await called
        texts = [answer.text for answer in answers] + [caught.value.details() or ""]
        assert all(answer.status_code >= 500 for answer in answers), texts
        for text in texts:
            assert lost.address not in text
            assert "127.0.0.1" not in text


async def test_credentials_of_a_backend_reach_it_and_nobody_else(
    hostile: HostileBackend, make_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hostile.answer = reply(200, {"choices": []})
    url = hostile.url.replace("http://", "http://alice:p%40ss@")
    async with make_cluster(workers=0, backends=(f"url={url},model=theirs,name=m",), backend_interval=0.2) as front:
        await front.http.post("/v1/completions", json={"model": "m", "prompt": "a"})
        basic = "Basic " + base64.b64encode(b"alice:p@ss").decode()
        assert {request.headers["authorization"] for request in hostile.received} == {basic}
        await hostile.stop()
        refused = await front.http.post("/v1/completions", json={"model": "m", "prompt": "a"})
        pages = [(await front.http.get(path)).text for path in ("/metrics", "/status", "/health", "/ui/fleet")]
        shown = "\n".join(
            (*pages, refused.text, str(await front.stub.GetStatus(router_pb2.GetStatusRequest())), caplog.text)
        )
        assert hostile.url in shown
        for secret in ("alice", "p%40ss", "p@ss", basic[6:]):
            assert secret not in shown
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await front.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address="http://alice:p@b:80"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "alice" not in (caught.value.details() or "")


def test_credentials_in_workers_are_taken_off_their_addresses(caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(workers=("http://alice:pw@a:8000/v1#m", "b:50061"))
    assert config.named_workers == ("http://a:8000/v1#m", "b:50061")
    assert config.backends_by_address["http://a:8000/v1#m"] == backend_at("http://alice:pw@a:8000/v1#m")
    assert "alice" not in repr(backend_at("http://alice:pw@a:8000"))
    assert read_addresses("http://alice:pw@a:80\nb:1\n") == ["b:1"]
    assert "alice" not in caplog.text


@pytest.mark.parametrize("text", ["url=http://alice:pw@", "url=http://alice:p,w@host", "url=http://h?key=pw", "nam=pw"])
def test_a_refused_backend_is_refused_without_its_credentials(text: str) -> None:
    with pytest.raises(ValueError, match="url") as caught:
        parse_backend(text, {})
    assert "pw" not in str(caught.value)
    assert "w@host" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("10.0.0.7", 200), ("evil.example", 403), ("operators.example:80", 200)],
)
async def test_the_status_page_is_shown_under_names_that_nobody_can_point_here(
    make_cluster: Any, host: str, status: int
) -> None:
    async with make_cluster(workers=1, cors_origins=("http://operators.example:80",)) as cluster:
        assert (await cluster.http.get("/status", headers={"host": host})).status_code == status
        if status == 200:
            foreign = {"host": host, "origin": "http://evil.example"}
            assert (await cluster.http.get("/status", headers=foreign)).status_code == 403


@pytest.mark.parametrize(
    "place", ["node-7.internal:9000", "gpu-4:8000", "fe80::1:9000", "HTTP://gpu-4/v1", "node_1:443", "10.0.0.7:9000"]
)
def test_no_address_is_told_though_no_worker_is_there(place: str) -> None:
    for text in (f"cannot connect to {place}", f"backend={place}: gone", f"({place}, {place})"):
        assert place not in WorkerNames(b"key").hide(text)


def test_what_is_no_address_is_told() -> None:
    text = "model qwen2.5:7b, error 404: nothing for 1.5 s at 12:30"
    assert WorkerNames(b"key").hide(text) == text
