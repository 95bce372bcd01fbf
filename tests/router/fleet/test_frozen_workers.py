"""Workers whose front says that their scheduler process stands still, or has been at one step for long."""

from __future__ import annotations

import asyncio

import pytest

from sapwood.v1 import router_pb2, worker_pb2
from sapwood_net.pacing.loop_lag import LoopLag
from sapwood_router.fleet.circuit_breaker import BreakerState
from sapwood_router.fleet.connection import MOST, SilenceLimit

SILENCE = 30.0  # no worker here is silent
SUSPECT = worker_pb2.SessionResponse(frozen_ms=40_000)
LOST = worker_pb2.SessionResponse(frozen_ms=70_000)
WELL = worker_pb2.SessionResponse()


def text_of(responses) -> str:
    return "".join(response.text for response in responses)


def known_as(cluster, fake):
    return next(worker for worker in cluster.router.registry.all() if worker.address == fake.address)


async def test_a_frozen_worker_gets_nothing_new_loses_its_streams_and_comes_back(make_cluster, wait_until) -> None:
    async with make_cluster(2, worker_silence=SILENCE) as cluster:
        for fake in cluster.workers:
            fake.script.gate, fake.script.gate_after = asyncio.Event(), 3
            fake.script.tokens = lambda prompt: prompt[1:7][
                len(prompt) - 7 :
            ]  # an answer repeats a prompt of six letters
        call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="abcdef"))
        stream = aiter(call)
        text = (await anext(stream)).text
        frozen, other = sorted(cluster.workers, key=lambda fake: -len(fake.calls))
        worker = known_as(cluster, frozen)

        frozen.vitals = SUSPECT
        await wait_until(lambda: not worker.available)
        assert worker.problem == "its scheduler process gives no sign of life"
        other.script.gate.set()
        for number in range(4):
            assert text_of(await cluster.generate(f"text {number}")) == f"text {number}"
        assert len(frozen.calls) == 1
        assert frozen.calls[0].outcome == "running"

        frozen.vitals = LOST
        async for response in stream:
            text += response.text
        assert text == "abcdef"
        assert dict(await call.trailing_metadata())["x-sapwood-resumptions"] == "1"
        await wait_until(lambda: worker.session is not None)  # it is watched again, but not used
        frozen.script.gate.set()
        assert text_of(await cluster.generate("number")) == "number"
        assert len(frozen.calls) == 1
        assert not worker.available

        frozen.vitals = WELL
        await wait_until(lambda: worker.available)
        assert worker.breaker.state is BreakerState.CLOSED
        metrics = (await cluster.http.get("/metrics")).text
        assert f'sapwood_router_worker_losses_total{{worker="{frozen.address}"}} 1.0' in metrics
        other.vitals = SUSPECT
        await wait_until(lambda: not known_as(cluster, other).available)
        assert text_of(await cluster.generate("at it!")) == "at it!"


async def test_a_busy_machine_makes_no_longer_time_of_a_process_that_stands_still(make_cluster, wait_until) -> None:
    async with make_cluster(2, worker_silence=SILENCE) as cluster:
        frozen, _ = cluster.workers
        frozen.vitals = worker_pb2.SessionResponse(frozen_ms=16_000, loop_lag_ms=10_000)
        await wait_until(lambda: not known_as(cluster, frozen).available)


async def test_an_embedding_on_a_worker_that_freezes_is_made_elsewhere(make_cluster, wait_until) -> None:
    async with make_cluster(2, worker_silence=SILENCE) as cluster:
        for fake in cluster.workers:
            fake.script.gate = asyncio.Event()
        asked = asyncio.ensure_future(cluster.http.post("/v1/embeddings", json={"input": "abc"}))
        await wait_until(lambda: any(fake.embed_calls for fake in cluster.workers))
        frozen, other = sorted(cluster.workers, key=lambda fake: -len(fake.embed_calls))
        other.script.gate.set()
        frozen.vitals = LOST
        assert (await asked).status_code == 200
        assert len(other.embed_calls) == 1


async def test_a_worker_that_is_frozen_when_it_is_first_met_waits_until_it_lives(make_cluster, wait_until) -> None:
    async with make_cluster(2, worker_silence=SILENCE) as cluster:
        frozen, _ = cluster.workers
        await frozen.kill()
        frozen.vitals = LOST
        await frozen.start()
        await wait_until(lambda: known_as(cluster, frozen).session is not None)
        for number in range(4):
            assert text_of(await cluster.generate(f"{number}")) == f"{number}"
        assert not frozen.calls
        frozen.vitals = WELL
        await wait_until(lambda: known_as(cluster, frozen).available)


async def test_one_that_has_been_at_a_step_for_long_is_chosen_where_there_is_no_other(make_cluster, wait_until) -> None:
    async with make_cluster(2) as cluster:
        slow, other = cluster.workers
        slow.vitals = worker_pb2.SessionResponse(step_ms=20_000)
        await wait_until(lambda: known_as(cluster, slow).step_seconds > 0)
        for number in range(4):
            assert text_of(await cluster.generate(f"{number}")) == f"{number}"
        assert (len(slow.calls), len(other.calls)) == (0, 4)
        explained = await cluster.stub.ExplainRoute(router_pb2.ExplainRouteRequest(request={"text": "abc"}))
        assert [item.excluded for item in explained.candidates if item.address == slow.address] == [
            "has been at one step for 20 s"
        ]
        await other.kill()
        await wait_until(lambda: not known_as(cluster, other).available)
        assert text_of(await cluster.generate("abc")) == "abc"
        assert len(slow.calls) == 1


@pytest.mark.parametrize(
    ("own", "told", "limit"),
    [(0.0, 0.0, 1.0), (0.1, 0.0, 1.4), (0.0, 0.2, 1.8), (0.1, 0.2, 2.2), (0.5, 0.5, MOST), (0.0, 1e6, MOST)],
)
def test_the_limit_of_silence_grows_with_what_runs_late_at_both_ends_up_to_a_bound(own, told, limit) -> None:
    lag = LoopLag()
    lag.measured(own)
    assert SilenceLimit(1.0, lag).seconds(told) == pytest.approx(limit)
