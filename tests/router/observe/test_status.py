"""The router's state as operators see it: over gRPC and on the page."""

import asyncio
import re

import pytest

from sapwood.v1 import router_pb2
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.config import RouterConfig
from sapwood_router.edges.http.status_page import render
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.observe.status import RouterState, WorkerState
from sapwood_router.routing.worker_view import Load


async def status(cluster) -> router_pb2.GetStatusResponse:
    return await cluster.stub.GetStatus(router_pb2.GetStatusRequest())


async def test_call_and_page_show_workers_load_rates_and_breakers(make_cluster, wait_until) -> None:
    async with make_cluster(2, breaker_open_seconds=600) as cluster:
        await cluster.generate("abcdefghijklmnop")
        done = await status(cluster)
        assert (done.running_requests, done.queued_requests, done.problem, done.policy) == (0, 0, "", "cache_aware")
        assert sum(worker.tokens_per_second for worker in done.workers) == pytest.approx(1.7, abs=0.15)
        for worker in cluster.workers:
            worker.script.gate = asyncio.Event()
        running = asyncio.ensure_future(cluster.generate("abc"))
        await wait_until(lambda: cluster.router.status().running == 1)
        await wait_until(lambda: len(cluster.calls()) == 2)
        during = await status(cluster)
        assert (during.running_requests, sum(worker.in_flight for worker in during.workers)) == (1, 1)
        for worker in cluster.workers:
            worker.script.gate.set()
        await running
        await cluster.workers[0].kill()
        dead, alive = cluster.workers
        seen = {worker.address: worker for worker in cluster.router.registry.all()}
        await wait_until(lambda: not seen[dead.address].available)
        for _ in range(5):
            seen[alive.address].breaker.fault()
        after = await status(cluster)
        told = {worker.address: (worker.healthy, worker.breaker) for worker in after.workers}
        assert not told[dead.address][0]
        assert told[alive.address] == (True, "open")
        response = await cluster.http.get("/status")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert 'http-equiv="refresh"' in response.text
        for shown in (*(worker.address for worker in cluster.workers), "fake", "down: ", "open", "cache_aware"):
            assert shown in response.text
        assert not re.search(r"<script|src=|https?://", response.text)


@pytest.mark.parametrize("said", ["address", "model", "problem", "breaker"])
def test_what_workers_say_is_text_and_no_markup(said) -> None:
    values = {"address": "a:1", "model": "m", "problem": "p", "breaker": "closed", said: "<script>alert(1)</script>"}
    worker = WorkerState(state="down", draining=False, epoch=1, in_flight=0, load=Load(), tokens_per_second=0, **values)
    state = RouterState(0, 0, 0, 0, problem="", policy="cache_aware", workers=(worker,))
    text = render(state, WorkerNames(b"key")).decode()
    assert "<script" not in text
    assert "&lt;script" in text


async def test_the_page_shows_no_tenant_no_prompt_and_is_off_where_keys_are_asked_for(make_cluster, tmp_path) -> None:
    key = make_key()
    (tmp_path / "keys").write_text(f"alice-secret {hash_key(key)}\n")
    metadata = (("authorization", f"Bearer {key}"),)
    async with make_cluster(1, api_keys=tmp_path / "keys") as cluster:
        assert (await cluster.http.get("/status")).status_code == 404
    async with make_cluster(1, api_keys=tmp_path / "keys", status_page="on") as cluster:
        await cluster.generate("a very private prompt", metadata=metadata)
        page = await cluster.http.get("/status")
        assert page.status_code == 200
        for secret in ("alice", key, hash_key(key), "private"):
            assert secret not in page.text


def test_when_there_is_a_page(tmp_path) -> None:
    shown = {
        "plain": RouterConfig().shows_status,
        "keys": RouterConfig(api_keys=tmp_path).shows_status,
        "admin": RouterConfig(admin_port=0).shows_status,
        "metrics": RouterConfig(metrics_port=0).shows_status,
        "off": RouterConfig(status_page="off").shows_status,
        "on": RouterConfig(status_page="on", admin_port=0).shows_status,
    }
    assert [name for name, there in shown.items() if there] == ["plain", "on"]
