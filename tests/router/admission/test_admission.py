"""The queue in front of busy workers: its order, its refusals, and that it loses nobody."""

import asyncio
import gc
import random
import weakref
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sapwood.v1 import router_pb2
from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError
from sapwood_common.status import from_rpc_error
from sapwood_common.tenants.tenant import Tenant, TenantSettings
from sapwood_router.admission.control import AdmissionControl
from sapwood_router.admission.fair_queue import Admission, AdmissionSettings, Ticket
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.outcome import Outcome
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.request.caller import Caller, caller_of
from sapwood_router.request.spending import Spending

FAR = 1e9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class NoSpread(random.Random):
    """Of all numbers always the least."""

    def random(self) -> float:
        return 0.0


class Queue:
    """An admission queue whose tickets have names."""

    def __init__(self, rng: random.Random | None = None, **options) -> None:
        self.clock = Clock()
        self.admission = Admission(AdmissionSettings(**options), self.clock, rng or NoSpread())
        self.gone: list[str] = []
        self.refused: dict[str, ResourceExhaustedError] = {}

    def enter(
        self,
        name: str,
        tenant: str = "",
        priority: int = 0,
        cost: float = 1.0,
        deadline: float = FAR,
        weight: float = 1.0,
        ready: bool = True,
    ) -> Ticket:
        ticket = Ticket(
            tenant,
            priority,
            cost,
            deadline,
            lambda: self.gone.append(name),
            lambda error: self.refused.__setitem__(name, error),
            weight,
            ready,
        )
        self.admission.enter(ticket)
        return ticket

    def drain(self) -> list[str]:
        while self.admission.release():
            pass
        return self.gone


def test_first_come_first_served_within_a_tenant_and_more_important_ones_before() -> None:
    queue = Queue()
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)):
        queue.enter(name, priority=priority)
    assert queue.drain() == ["c", "e", "a", "b", "d"]


def test_a_tenant_with_many_requests_delays_anothers_by_one_at_most() -> None:
    queue = Queue()
    for number in range(50):
        queue.enter(f"many-{number}", tenant="many")
    queue.enter("few-0", tenant="few")
    queue.enter("few-1", tenant="few")
    order = queue.drain()
    assert order.index("few-0") <= 1
    assert order.index("few-1") <= 3


def test_shares_follow_weights_and_costs() -> None:
    queue = Queue()
    for number in range(40):
        queue.enter(f"heavy-{number}", tenant="heavy", cost=10, weight=3.0)
        queue.enter(f"light-{number}", tenant="light", cost=10)
        queue.enter(f"big-{number}", tenant="big", cost=20)
    first = queue.drain()[:45]
    shares = {name: sum(item.startswith(name) for item in first) for name in ("heavy", "light", "big")}
    assert abs(shares["heavy"] - 30) <= 2
    assert abs(shares["light"] - 10) <= 2
    assert abs(shares["big"] - 5) <= 2


def test_who_was_idle_has_saved_up_nothing() -> None:
    queue = Queue()
    for number in range(10):
        queue.enter(f"a{number}", tenant="a")
    for _ in range(8):
        queue.admission.release()
    for number in range(4):
        queue.enter(f"b{number}", tenant="b")
    assert queue.drain()[8:12] in (["a8", "b0", "a9", "b1"], ["b0", "a8", "b1", "a9"], ["a8", "b0", "b1", "a9"])


def test_a_full_queue_refuses_the_latest_of_the_least_important() -> None:
    queue = Queue(most_waiting=3)
    for name, priority in (("a", 0), ("b", 0), ("c", 1)):
        queue.enter(name, priority=priority)
    with pytest.raises(ResourceExhaustedError) as caught:
        queue.enter("d")
    assert caught.value.retry_after >= 1
    queue.enter("e", priority=1)
    assert set(queue.refused) == {"b"}
    assert queue.drain() == ["c", "e", "a"]


def test_what_cannot_make_its_deadline_is_refused_at_once() -> None:
    queue = Queue()
    for number in range(20):
        queue.enter(f"{number}")
    for _ in range(10):
        queue.clock.now += 0.5
        queue.admission.release()
    # Two leave a second, ten wait: five seconds.
    with pytest.raises(ResourceExhaustedError) as caught:
        queue.enter("late", deadline=queue.clock.now + 4)
    assert caught.value.retry_after == pytest.approx(5, abs=1)
    queue.enter("in time", deadline=queue.clock.now + 7)
    queue.enter("first", priority=1, deadline=queue.clock.now + 0.1)


def test_a_flood_that_fills_the_queue_gives_way_to_another_tenant_up_to_its_share() -> None:
    queue = Queue(most_waiting=10)
    for number in range(10):
        queue.enter(f"many-{number}", tenant="many")
    for number in range(5):
        queue.enter(f"few-{number}", tenant="few")
    assert list(queue.refused) == [f"many-{number}" for number in (9, 8, 7, 6, 5)]
    for tenant in ("few", "many"):
        with pytest.raises(ResourceExhaustedError):
            queue.enter("more", tenant=tenant)
    assert sorted(queue.drain()[:4]) == ["few-0", "few-1", "many-0", "many-1"]


def test_what_was_refused_is_not_counted_to_its_tenants_share() -> None:
    queue = Queue(most_waiting=4)
    for number in range(4):
        queue.enter(f"many-{number}", tenant="many")
    queue.enter("few-0", tenant="few")
    for _ in range(5):
        queue.admission.release()
    queue.enter("few-1", tenant="few")
    for number in range(4, 7):
        queue.enter(f"many-{number}", tenant="many")
    assert queue.drain()[-4:] == ["few-1", "many-4", "many-5", "many-6"]


def test_a_tenant_is_not_refused_for_the_wait_of_anothers_flood() -> None:
    queue = Queue(most_wait=4.0)
    for number in range(30):
        queue.enter(f"many-{number}", tenant="many")
    for _ in range(10):
        queue.clock.now += 0.5
        queue.admission.release()
    with pytest.raises(ResourceExhaustedError) as caught:  # two leave a second, twenty wait
        queue.enter("many-30", tenant="many")
    assert caught.value.retry_after == pytest.approx(10, abs=1)
    queue.enter("few-0", tenant="few", deadline=queue.clock.now + 1.1)
    queue.enter("few-1", tenant="few", deadline=queue.clock.now + 2.1)
    with pytest.raises(ResourceExhaustedError):
        queue.enter("few-2", tenant="few", deadline=queue.clock.now + 1.1)
    assert queue.drain()[10:14] in (["many-10", "few-0", "many-11", "few-1"], ["few-0", "many-10", "few-1", "many-11"])


def test_those_refused_together_are_told_to_come_again_at_different_times() -> None:
    queue = Queue(random.Random(1), most_waiting=1)
    queue.enter("a")
    delays = []
    for _ in range(200):
        with pytest.raises(ResourceExhaustedError) as caught:
            queue.enter("b")
        delays.append(caught.value.retry_after)
    assert 1.0 <= min(delays) < 1.1
    assert 1.9 < max(delays) <= 2.0


def test_names_of_tenants_are_not_kept_for_ever() -> None:
    class Name(str):
        """Tells those that this test made from all others."""

    queue, names = Queue(most_waiting=4), []
    queue.enter("first", tenant="a")
    for number in range(1000):  # one at least waits at any time
        tenant = Name(number)
        names.append(weakref.ref(tenant))
        queue.enter(tenant, tenant=tenant)
        queue.admission.release()
    queue.gone.clear()
    del tenant
    gc.collect()
    assert sum(name() is not None for name in names) <= 15


def test_nobody_waits_longer_than_the_most() -> None:
    queue = Queue(most_wait=3.0)
    queue.enter("a")
    queue.clock.now = 2.0
    queue.enter("b")
    queue.clock.now = 3.1
    queue.admission.expire()
    assert set(queue.refused) == {"a"}
    assert queue.drain() == ["b"]


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}


@dataclass
class Plain:
    """What waits, in the model."""

    name: str
    tenant: str
    priority: int
    start: float
    finish: float
    ready: bool


class AgainstAModel(RuleBasedStateMachine):
    """Who goes, who is refused, and that each request ends in exactly one way, as a list searched from end to end says."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(most_waiting=6)
        self.waiting: list[Plain] = []
        """In the order in which they came."""
        self.virtual: dict[int, float] = {}
        self.finish: dict[tuple[int, str], float] = {}
        self.tickets: dict[str, Ticket] = {}
        self.count = 0
        self.entered = self.left = 0

    def last(self) -> Plain:
        """Who would go last."""
        lowest = min(each.priority for each in self.waiting)
        others = [each for each in self.waiting if each.priority == lowest]
        most = max(each.start for each in others)
        return [each for each in others if each.start == most][-1]

    def gone(self, plain: Plain, served: bool) -> None:
        self.waiting.remove(plain)
        key = plain.priority, plain.tenant
        if served:
            self.virtual[plain.priority] = max(plain.start, self.virtual.get(plain.priority, 0.0))
        elif self.finish[key] == plain.finish:
            self.finish[key] = plain.start
        if not any(each.priority == plain.priority for each in self.waiting):
            self.virtual.pop(plain.priority, None)
            self.finish = {key: value for key, value in self.finish.items() if key[0] != plain.priority}

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(0, 1), cost=st.integers(1, 9), ready=st.booleans())
    def enter(self, tenant: str, priority: int, cost: int, ready: bool) -> None:
        name = str(self.count)
        self.count += 1
        start = max(self.virtual.get(priority, 0.0), self.finish.get((priority, tenant), 0.0))
        full = len(self.waiting) == 6
        last = self.last() if full else None
        foreseen = None
        try:
            self.queue.admission.check(tenant, priority, FAR)
        except ResourceExhaustedError as error:
            foreseen = error
        if last is not None and (priority, -start) <= (last.priority, -last.start):
            with pytest.raises(ResourceExhaustedError) as caught:
                self.queue.enter(name, tenant, priority, cost, weight=WEIGHTS[tenant])
            assert foreseen is not None
            assert foreseen.message == caught.value.message
            return
        assert foreseen is None
        before = set(self.queue.refused)
        self.tickets[name] = self.queue.enter(name, tenant, priority, cost, weight=WEIGHTS[tenant], ready=ready)
        self.entered += 1
        assert set(self.queue.refused) - before == ({last.name} if last is not None else set())
        if last is not None:
            self.gone(last, served=False)
            start = max(self.virtual.get(priority, 0.0), self.finish.get((priority, tenant), 0.0))
        finish = start + cost / WEIGHTS[tenant]
        self.finish[priority, tenant] = finish
        self.waiting.append(Plain(name, tenant, priority, start, finish, ready))

    @rule()
    def release(self) -> None:
        ready = [each for each in self.waiting if each.ready]
        assert self.queue.admission.release() == bool(ready)
        if ready:
            highest = max(each.priority for each in ready)
            first = min((each for each in ready if each.priority == highest), key=lambda each: each.start)
            assert self.queue.gone[-1] == first.name
            self.gone(first, served=True)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def prepared(self, data) -> None:
        plain = data.draw(st.sampled_from(self.waiting))
        plain.ready = self.tickets[plain.name].ready = True

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.tickets)))
        self.queue.admission.leave(self.tickets[name])
        for plain in [each for each in self.waiting if each.name == name]:
            self.gone(plain, served=False)
            self.left += 1

    @invariant()
    def accounted(self) -> None:
        assert self.queue.admission.waiting == len(self.waiting) <= 6
        assert self.entered == len(self.queue.gone) + len(self.queue.refused) + len(self.waiting) + self.left


AgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstAModel = AgainstAModel.TestCase


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
