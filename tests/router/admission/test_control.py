"""Requests that wait for a worker with room: who continues, who is refused, and whose word for a priority counts."""

import asyncio
import itertools
import random
from collections.abc import Callable

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError
from sapwood_common.status import from_rpc_error
from sapwood_common.tenants.tenant import Tenant, TenantSettings
from sapwood_net.http2.server.turnstile import MOST_A_TURN
from sapwood_router.admission.control import AdmissionControl
from sapwood_router.admission.fair_queue import AdmissionSettings
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker, Outcome
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.request.caller import Caller, Spending, caller_of
from sapwood_testing.clock import Clock

FAR = 1e9


@pytest.mark.parametrize("value", ["high", "101", "-101", "1.5"])
def test_a_priority_that_makes_no_sense_is_named(value) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        caller_of({"x-priority": value}.get, None)
    assert caught.value.field == "x-priority"


def test_the_tenant_is_the_keys_name_where_there_are_keys() -> None:
    given = {"x-tenant": "me", "x-priority": "-3", "x-session-id": "s"}
    caller = caller_of(given.get, None)
    assert (caller.tenant, caller.priority, caller.session, caller.weight) == ("me", -3, "s", 1.0)
    account = Tenant(TenantSettings("key", weight=2.0, cache_salt="salt"), Clock())
    assert caller_of(given.get, account) == Caller("key", -3, "s", 2.0, "salt", Spending(account))


async def test_requests_beyond_the_workers_room_wait_their_turn(make_cluster, wait_until) -> None:
    async with make_cluster(2, requests_per_worker=2) as cluster:
        gate = asyncio.Event()
        for worker in cluster.workers:
            worker.script.gate = gate
        running = [asyncio.ensure_future(cluster.generate(f"text {number}")) for number in range(12)]
        await wait_until(lambda: len(cluster.calls()) == 4 and cluster.router.status().queued == 8)
        late = asyncio.ensure_future(cluster.generate("urgent!!", metadata=(("x-priority", "1"),)))
        await wait_until(lambda: cluster.router.status().queued == 9)
        assert len(cluster.calls()) == 4
        assert "sapwood_router_queued_requests 9.0" in (await cluster.http.get("/metrics")).text
        gate.set()
        texts = ["".join(r.text for r in responses) for responses in await asyncio.gather(*running, late)]
        assert texts == [*(f"text {number}" for number in range(12)), "urgent!!"]
        assert any(len(worker.calls[2].request.token_ids) == 9 for worker in cluster.workers)  # the next one, once
        await cluster.idle()


async def test_of_many_that_come_at_once_only_those_that_fit_are_tokenized(make_cluster, wait_until) -> None:
    async with make_cluster(1, requests_per_worker=2, queue_size=3) as cluster:
        cluster.workers[0].script.gate = asyncio.Event()
        tasks = [asyncio.ensure_future(cluster.generate(f"text {number}")) for number in range(40)]
        await wait_until(lambda: sum(task.done() for task in tasks) == 35)
        await wait_until(lambda: len(cluster.calls()) == 2 and cluster.router.status().queued == 3)
        assert len(cluster.tokenizer.request_ids) == 5
        cluster.workers[0].script.gate.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, list) for each in ended) == 5
        await cluster.idle()


async def test_a_full_queue_is_429_with_a_delay_and_a_client_that_leaves_frees_its_place(
    make_cluster, wait_until
) -> None:
    async with make_cluster(1, requests_per_worker=1, queue_size=1) as cluster:
        cluster.workers[0].script.gate = asyncio.Event()
        first = asyncio.ensure_future(cluster.generate("first"))
        await wait_until(lambda: len(cluster.calls()) == 1)
        call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="second"))
        reading = asyncio.ensure_future(call.read())
        await wait_until(lambda: cluster.router.status().queued == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate("third")
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhaustedError)
        assert 1 <= error.retry_after <= 2
        tokenized = len(cluster.tokenizer.request_ids)
        for path, body in (("completions", {"prompt": "third"}), ("embeddings", {"input": "third"})):
            response = await cluster.http.post(f"/v1/{path}", json=body)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert 1000 <= int(response.headers["retry-after-ms"]) <= 2000
        assert len(cluster.tokenizer.request_ids) == tokenized  # refused before anything was done for them
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await wait_until(lambda: cluster.router.status().queued == 0)
        fourth = asyncio.ensure_future(cluster.generate("fourth"))
        await wait_until(lambda: cluster.router.status().queued == 1)
        cluster.workers[0].script.gate.set()
        for task, text in ((first, "first"), (fourth, "fourth")):
            assert "".join(r.text for r in await task) == text


async def test_a_deadline_passes_in_the_queue(make_cluster, wait_until, expect_error) -> None:
    async with make_cluster(1, requests_per_worker=1) as cluster:
        cluster.workers[0].script.gate = asyncio.Event()
        first = asyncio.ensure_future(cluster.generate("first"))
        await wait_until(lambda: len(cluster.calls()) == 1)
        await expect_error(cluster.generate("second", timeout=0.3), grpc.StatusCode.DEADLINE_EXCEEDED)
        cluster.workers[0].script.gate.set()
        await first
        assert len(cluster.calls()) == 1
        await cluster.idle()


async def test_of_those_that_wait_a_half_open_breaker_lets_one_go() -> None:
    clock = Clock()
    full, failed = (Worker(name, CircuitBreaker(BreakerSettings(), clock), clock) for name in ("full", "failed"))
    registry = Registry([full, failed], most_requests=lambda model: 4)
    for worker in (full, failed):
        registry.mark_up(worker, ServedModel("m", 100, 10, 4, 10, epoch=1))
    for _ in range(4):
        full.lease(1)
    for _ in range(5):
        failed.breaker.fault()
    control = AdmissionControl(registry, AdmissionSettings(), clock, random.Random(0))
    places = [control.reserve("m", Caller(), 1, FAR) for _ in range(6)]
    turns = [asyncio.ensure_future(place.turn()) for place in places if not place.ready()]
    assert len(turns) == 6
    clock.now += 1.0
    control.pump()
    await asyncio.sleep(0)
    assert [turn.done() for turn in turns] == [True, *(False,) * 5]
    probe = failed.breaker.begin()
    control.pump()
    assert control.waiting == 5
    probe.end(Outcome.SUCCESS)
    failed.lease(1)
    control.pump()
    assert control.waiting == 2
    for turn in turns:
        turn.cancel()


def full_worker() -> tuple[AdmissionControl, Worker, Callable[[int], None]]:
    """A queue before a worker whose only place is taken; what empties it and makes room for so many at once."""
    clock, room = Clock(), 1
    worker = Worker("w", CircuitBreaker(BreakerSettings(), clock), clock)
    registry = Registry([worker], most_requests=lambda model: room)
    registry.mark_up(worker, ServedModel("m", 100, 10, 4, 10, epoch=1))
    lease = worker.lease(1)
    control = AdmissionControl(registry, AdmissionSettings(), clock, random.Random(0))

    def make_room(most: int) -> None:
        nonlocal room
        lease.release()
        room = most
        registry.mark_up(worker, ServedModel("m", 100, 10, 4, 10, epoch=2))
        control.pump()

    return control, worker, make_room


async def test_below_the_floor_nobody_goes_though_there_is_room_and_above_it_everybody_does() -> None:
    clock, floor = Clock(), None
    worker = Worker("w", CircuitBreaker(BreakerSettings(), clock), clock)
    registry = Registry([worker], most_requests=lambda model: 100)
    registry.mark_up(worker, ServedModel("m", 100, 10, 4, 10, epoch=1))
    control = AdmissionControl(registry, AdmissionSettings(), clock, random.Random(0), lambda model, taken: floor)
    prepared = control.reserve("m", Caller(priority=-1), 1, FAR)
    floor = 0
    held = [prepared, control.reserve("m", Caller(priority=-1), 1, FAR)]
    assert not any(place.ready() for place in held) and all(place.held for place in held)
    free = control.reserve("m", Caller(priority=0), 1, FAR)
    assert free.ready() and not free.held
    turns = [asyncio.ensure_future(place.turn()) for place in held]
    control.pump()
    await asyncio.sleep(0)
    assert control.waiting == 2
    floor = -1
    control.pump()
    await asyncio.gather(*turns)
    assert control.waiting == 0


async def test_who_cannot_meet_its_objective_any_more_leaves_the_queue() -> None:
    control, _, _ = full_worker()
    clock = control._clock
    place = control.reserve("m", Caller(), 1, FAR, 1.0)
    turn = asyncio.ensure_future(place.turn())
    patient = control.reserve("m", Caller(), 1, FAR)
    await asyncio.sleep(0)
    [line] = control._lines.values()
    line.queue.expire()
    assert control.waiting == 2
    clock.now += 1.1
    line.queue.expire()
    with pytest.raises(ResourceExhaustedError, match="cannot be met any more"):
        await turn
    assert control.waiting == 1
    patient.leave()


async def test_of_many_that_are_let_go_at_once_a_few_choose_in_each_turn_of_the_loop() -> None:
    """A message in which hundreds of answers end makes room for as many requests."""
    control, _, make_room = full_worker()
    places = [control.reserve("m", Caller(), 1, FAR) for _ in range(50)]
    turns = [asyncio.ensure_future(place.turn()) for place in places if not place.ready()]
    await asyncio.sleep(0)
    make_room(100)
    chosen = [0]
    while chosen[-1] < len(turns):
        await asyncio.sleep(0)
        chosen.append(sum(turn.done() for turn in turns))
    assert max(after - before for before, after in itertools.pairwise(chosen)) <= MOST_A_TURN


async def test_who_comes_while_many_of_another_begin_does_not_wait_for_all_of_them() -> None:
    control, worker, make_room = full_worker()
    chosen: list[str] = []

    async def ask(tenant: str) -> None:
        place = control.reserve("m", Caller(tenant), 1, FAR)
        if not place.ready():
            await place.turn()
        worker.lease(1)
        chosen.append(tenant)

    many = [asyncio.ensure_future(ask("many")) for _ in range(500)]
    await asyncio.sleep(0)
    assert control.waiting == 500
    make_room(400)
    async with asyncio.timeout(20):
        await ask("one")
    assert len(chosen) <= 8 * MOST_A_TURN
    while worker.room:
        await asyncio.sleep(0)
    assert chosen.count("many") == 399
    for task in many:
        task.cancel()


async def test_an_idle_caller_begins_at_once_beside_another_callers_thousand() -> None:
    clock = Clock()
    worker = Worker("w", CircuitBreaker(BreakerSettings(), clock), clock)
    registry = Registry([worker], most_requests=lambda model: 2 * model.max_running)
    registry.mark_up(worker, ServedModel("m", 100, 10, 4, 10, epoch=1, max_running=16))
    control = AdmissionControl(registry, AdmissionSettings(), clock, random.Random(0))
    begun: dict[str, list[Lease]] = {name: [] for name in ("many", "one", "two", "three", "low")}

    async def ask(tenant: str, priority: int = 0) -> None:
        place = control.reserve("m", Caller(tenant, priority), 1, FAR)
        await asyncio.sleep(0)  # it is prepared
        if not place.ready():
            await place.turn()
        begun[tenant].append(worker.lease(1, tenant))

    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    asked = [asyncio.ensure_future(ask("many")) for _ in range(200)]
    await settle()
    assert len(begun["many"]) == 30 >= 16, "all that the worker runs at once are one tenant's"
    asked += [asyncio.ensure_future(ask(name, -(name == "low"))) for name in ("low", "one", "one", "two", "three")]
    await settle()
    assert {name: len(leases) for name, leases in begun.items()} == {
        "many": 30,
        "one": 1,
        "two": 1,
        "three": 0,
        "low": 0,
    }
    begun["one"].pop().release()
    control.pump()
    await settle()
    assert len(begun["three"]) == 1, "the place that was kept goes to the next who has nothing running"
    assert len(begun["many"]) == 30
    for _ in range(3):
        begun["many"].pop().release()
    control.pump()
    await settle()
    assert worker.in_flight == 30, "all but those that are kept are for who has waited"
    for task in asked:
        task.cancel()


@pytest.mark.parametrize(
    ("most", "running", "kept"), [(512, 256, 32), (32, 16, 2), (16, 16, 0), (8, 16, 0), (18, 16, 1)]
)
def test_no_place_is_kept_of_those_that_a_worker_runs_at_once(most, running, kept) -> None:
    worker = Worker("w", CircuitBreaker(BreakerSettings(), Clock()), Clock())
    registry = Registry([worker], most_requests=lambda model: most)
    registry.mark_up(worker, ServedModel("m", 100, 10, 4, 10, epoch=1, max_running=running))
    assert worker.kept == kept
    assert worker.open_room == most - kept


def test_a_tenant_whose_requests_have_ended_has_nothing_running() -> None:
    worker = Worker("w", CircuitBreaker(BreakerSettings(), Clock()), Clock())
    registry = Registry([worker], most_requests=lambda model: 512)
    registry.mark_up(worker, ServedModel("m", 100, 10, 4, 10, epoch=1, max_running=256))
    leases = [worker.lease(1, "one") for _ in range(8)]
    assert not registry.has_few("m", "one")
    assert registry.has_few("m", "two")
    for lease in leases:
        lease.release()
        lease.release()
    assert registry.has_few("m", "one")
    assert worker.running == {}


class Busy:
    """A worker of 32 places, two of which are kept, or of more; and who has them."""

    def __init__(self, running: int = 16) -> None:
        clock = Clock()
        self.worker = Worker("w", CircuitBreaker(BreakerSettings(), clock), clock)
        registry = Registry([self.worker], most_requests=lambda model: 2 * model.max_running)
        registry.mark_up(self.worker, ServedModel("m", 100, 10, 4, 10, epoch=1, max_running=running))
        self.control = AdmissionControl(registry, AdmissionSettings(), clock, random.Random(0))
        self.begun: list[tuple[str, Lease]] = []
        self.asked: list[asyncio.Task[None]] = []

    def ask(self, tenant: str, times: int = 1) -> None:
        self.asked += [asyncio.ensure_future(self._ask(tenant)) for _ in range(times)]

    def end_first(self) -> str:
        tenant, lease = self.begun.pop(0)
        lease.release()
        return tenant

    async def settle(self) -> None:
        self.control.pump()
        for _ in range(20):
            await asyncio.sleep(0)

    async def _ask(self, tenant: str) -> None:
        place = self.control.reserve("m", Caller(tenant), 1, FAR)
        await asyncio.sleep(0)  # it is prepared
        if not place.ready():
            await place.turn()
        self.begun.append((tenant, self.worker.lease(1, tenant)))


async def test_more_tenants_than_places_leave_nobodys_second_request_waiting_for_ever() -> None:
    """Whenever a place is free one waits who has nothing running."""
    busy, served = Busy(), []
    for number in range(48):
        busy.ask(f"tenant-{number}")
    await busy.settle()
    busy.ask("one", 10)
    await busy.settle()
    for _ in range(600):
        served.append(busy.end_first())
        if served[-1] != "one":
            busy.ask(served[-1])
        await busy.settle()
    assert served.count("one") == 10
    for task in busy.asked:
        task.cancel()


async def test_requests_of_one_tenant_released_together_leave_reserved_places_to_others() -> None:
    busy = Busy(running=128)
    busy.ask("many", 300)
    await busy.settle()
    for number in range(16):
        busy.ask(f"tenant-{number}")
    await busy.settle()
    assert busy.worker.in_flight == 256, "no place is left"
    busy.ask("one", 20)
    await busy.settle()
    few = [lease for tenant, lease in busy.begun if tenant.startswith("tenant")]
    for lease in few:
        lease.release()
    await busy.settle()
    begun = [tenant for tenant, _ in busy.begun]
    assert 1 <= begun.count("one") <= 4, "a part of the 16 that are kept"
    for task in busy.asked:
        task.cancel()
