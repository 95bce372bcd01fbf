"""Requests with objectives through the whole router: what they are told, and who makes way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from sapwood_common.errors import ResourceExhaustedError
from sapwood_common.status import from_rpc_error
from sapwood_common.tenants.api_keys import hash_key, make_key

FAR = {"x-slo-ttft-ms": "60000"}
SOON = {"x-slo-ttft-ms": "200"}


async def ask(cluster: Any, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": "go", "max_tokens": 4, **fields}
    return await cluster.http.post("/v1/completions", json=body, headers=headers)


async def learn(cluster: Any, rate: float = 2000.0) -> None:
    """Has the router measure that the worker computes so many prompt tokens a second."""
    [worker] = cluster.workers
    for size in (50, 100, 200, 300) * 3:
        worker.script.delay = size / rate
        assert (await ask(cluster, FAR, prompt="x" * size, max_tokens=1)).status_code == 200
    worker.script.delay = 0.0


async def test_an_answer_says_whether_its_objective_was_met_and_others_say_nothing(make_cluster: Any) -> None:
    async with make_cluster(1) as cluster:
        plain = await ask(cluster)
        assert "x-sapwood-objective" not in plain.headers
        met = await ask(cluster, FAR)
        assert met.headers["x-sapwood-objective"] == "met"
        assert met.json()["choices"] == plain.json()["choices"]
        missed = await ask(cluster, {"x-slo-tpot-ms": "0.001"})
        assert (missed.status_code, missed.headers["x-sapwood-objective"]) == (200, "missed")  # nothing was known
        stream = (await ask(cluster, FAR, stream=True)).text
        *_, last = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert last["x-sapwood-objective"] == "met"
        assert "objective" not in (await ask(cluster, stream=True)).text
        call = cluster.stub.Generate(_request(), metadata=tuple(FAR.items()))
        async for _ in call:
            pass
        assert dict(await call.trailing_metadata())["x-sapwood-objective"] == "met"
        metrics = (await cluster.http.get("/metrics")).text
        assert 'sapwood_router_objectives_total{outcome="met",priority="0"} 3.0' in metrics
        assert 'sapwood_router_objectives_total{outcome="missed",priority="0"} 1.0' in metrics


def _request() -> Any:
    from sapwood.v1 import router_pb2

    request = router_pb2.RouterGenerateRequest(text="go")
    request.sampling.max_tokens = 4
    return request


async def test_bad_targets_are_400_and_name_the_header(make_cluster: Any) -> None:
    async with make_cluster(1) as cluster:
        for key in ("x-slo-ttft-ms", "x-slo-tpot-ms"):
            answer = await ask(cluster, {key: "soon"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, key)


async def test_a_keys_rule_bounds_what_its_requests_may_name(make_cluster: Any, tmp_path: Any) -> None:
    key, path = make_key(), tmp_path / "keys"
    path.write_text(f"alice {hash_key(key)} ttft-ms=100-60000\n")
    async with make_cluster(1, api_keys=path) as cluster:
        own = {"authorization": f"Bearer {key}"}
        assert (await ask(cluster, own)).headers["x-sapwood-objective"] == "met"
        assert (await ask(cluster, own | {"x-slo-ttft-ms": "99"})).json()["error"]["param"] == "x-slo-ttft-ms"


async def test_what_cannot_be_met_is_429_at_once_and_costs_no_worker_and_no_allowance(
    make_cluster: Any, tmp_path: Any
) -> None:
    key, path = make_key(), tmp_path / "keys"
    path.write_text(f"alice {hash_key(key)} tokens=100000\n")
    async with make_cluster(1, api_keys=path) as cluster:
        cluster.http.headers["authorization"] = f"Bearer {key}"
        await learn(cluster)
        calls, left = len(cluster.calls()), _allowance(cluster)
        answer = await ask(cluster, SOON, prompt="x" * 1000)  # half a second
        assert (answer.status_code, answer.headers["x-sapwood-objective"]) == (429, "shed")
        assert int(answer.headers["retry-after-ms"]) >= 100 and int(answer.headers["retry-after"]) >= 1
        assert "the objective cannot be met" in answer.json()["error"]["message"]
        metadata = (*SOON.items(), ("authorization", f"Bearer {key}"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate("x" * 1000, metadata=metadata)
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhaustedError) and error.retry_after
        assert len(cluster.calls()) == calls and _allowance(cluster) >= left
        assert (await ask(cluster, prompt="x" * 1000)).status_code == 200  # others are served as ever
        metrics = (await cluster.http.get("/metrics")).text
        assert 'sapwood_router_objectives_total{outcome="shed",priority="0"} 2.0' in metrics
        await cluster.idle()


def _allowance(cluster: Any) -> float:
    """What is left of the tokens a minute."""
    tokens = cluster.router._keys.named("alice")._tokens
    assert not tokens.wait()
    return tokens._left


async def test_lower_classes_are_held_while_headroom_is_short_and_are_told(make_cluster: Any, wait_until: Any) -> None:
    async with make_cluster(1) as cluster:
        [worker] = cluster.workers
        await learn(cluster)
        worker.script.gate = asyncio.Event()
        first = asyncio.ensure_future(ask(cluster, {"x-slo-ttft-ms": "1000"}))
        await wait_until(lambda: worker.calls[-1].outcome == "running")
        cluster.router.registry.all()[0].pending_tokens += 1_000_000  # another request's prompt that is queued there
        batch = asyncio.ensure_future(ask(cluster, {"x-priority": "-100"}))
        await wait_until(lambda: cluster.router.status().queued == 1)
        calls = len(worker.calls)
        same = asyncio.ensure_future(ask(cluster))  # of the class itself, without an objective: it does not wait
        await wait_until(lambda: len(worker.calls) == calls + 1)
        assert cluster.router.status().queued == 1
        cluster.router.registry.all()[0].pending_tokens -= 1_000_000
        worker.script.gate.set()
        held = await batch
        assert (held.status_code, held.headers["x-sapwood-objective"]) == (200, "held")
        assert (await first).status_code == (await same).status_code == 200
        assert "x-sapwood-objective" not in (await same).headers
        metrics = (await cluster.http.get("/metrics")).text
        assert 'sapwood_router_made_way_total{how="held",priority="-100"} 1.0' in metrics
        await cluster.idle()


async def test_a_lower_class_without_a_token_makes_way_and_gets_the_same_answer_later(
    make_cluster: Any, wait_until: Any
) -> None:
    async with make_cluster(1) as cluster:
        [worker] = cluster.workers
        await learn(cluster)
        worker.script.gate = asyncio.Event()
        long = "y" * 20_000
        batch = asyncio.ensure_future(ask(cluster, {"x-priority": "-100"}, prompt=long, max_tokens=8))
        await wait_until(lambda: len(worker.calls[-1].request.token_ids) > 10_000)
        seen = worker.calls[-1]
        chat = asyncio.ensure_future(ask(cluster, {"x-slo-ttft-ms": "1000"}))
        await wait_until(lambda: seen.outcome == "cancelled" and worker.calls[-1] is not seen)
        worker.script.gate.set()
        assert (await chat).status_code == 200
        answer = await batch
        assert (answer.status_code, answer.headers["x-sapwood-objective"]) == (200, "preempted")
        assert answer.json()["choices"][0]["text"] == "y" * 8
        assert answer.headers["x-sapwood-resumptions"] == "0"
        metrics = (await cluster.http.get("/metrics")).text
        assert 'sapwood_router_made_way_total{how="preempted",priority="-100"} 1.0' in metrics
        await cluster.idle()
