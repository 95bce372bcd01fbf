"""The queue in front of busy workers: its order, its refusals, and that it loses nobody."""

import asyncio

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sapwood.v1 import router_pb2
from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError
from sapwood_common.status import from_rpc_error
from sapwood_common.tenant import Tenant, TenantSettings
from sapwood_router.admission import Admission, AdmissionSettings, Ticket
from sapwood_router.caller import Caller, caller_of

FAR = 1e9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """An admission queue whose tickets have names."""

    def __init__(self, **options) -> None:
        self.clock = Clock()
        self.admission = Admission(AdmissionSettings(**options), self.clock)
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
    ) -> Ticket:
        ticket = Ticket(
            tenant,
            priority,
            cost,
            deadline,
            lambda: self.gone.append(name),
            lambda error: self.refused.__setitem__(name, error),
            weight,
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


def test_nobody_waits_longer_than_the_most() -> None:
    queue = Queue(most_wait=3.0)
    queue.enter("a")
    queue.clock.now = 2.0
    queue.enter("b")
    queue.clock.now = 3.1
    queue.admission.expire()
    assert set(queue.refused) == {"a"}
    assert queue.drain() == ["b"]


class AgainstAModel(RuleBasedStateMachine):
    """Order within a tenant and class, bounds, and that each request ends in exactly one way."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(most_waiting=6)
        self.waiting: dict[str, tuple[int, str]] = {}
        self.tickets: dict[str, Ticket] = {}
        self.count = 0
        self.entered = self.left = 0

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(0, 2), cost=st.integers(1, 9))
    def enter(self, tenant: str, priority: int, cost: int) -> None:
        name = str(self.count)
        self.count += 1
        lowest = min((p for p, _ in self.waiting.values()), default=0)
        before = set(self.queue.refused)
        foreseen = None
        try:
            self.queue.admission.check(priority, FAR)
        except ResourceExhaustedError as error:
            foreseen = error
        try:
            self.tickets[name] = self.queue.enter(name, tenant, priority, cost)
        except ResourceExhaustedError as error:
            assert foreseen is not None
            assert foreseen.message == error.message
            assert len(self.waiting) == 6
            assert priority <= lowest
            return
        assert foreseen is None
        self.entered += 1
        for refused in set(self.queue.refused) - before:
            assert len(self.waiting) == 6
            assert self.waiting[refused][0] == lowest < priority
            del self.waiting[refused]
        self.waiting[name] = (priority, tenant)

    @rule()
    def release(self) -> None:
        before = len(self.queue.gone)
        assert self.queue.admission.release() == bool(self.waiting)
        if len(self.queue.gone) > before:
            name = self.queue.gone[-1]
            priority, tenant = self.waiting.pop(name)
            assert all(priority >= p for p, _ in self.waiting.values())
            assert all(int(name) < int(n) for n, key in self.waiting.items() if key == (priority, tenant))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.tickets)))
        self.queue.admission.leave(self.tickets[name])
        if self.waiting.pop(name, None) is not None:
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
    assert caller_of(given.get, account) == Caller("key", -3, "s", 2.0, "salt", account)


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


async def test_a_full_queue_is_429_with_a_delay_and_a_client_that_leaves_frees_its_place(
    make_cluster, wait_until
) -> None:
    async with make_cluster(1, requests_per_worker=1, queue_size=1) as cluster:
        cluster.workers[0].script.gate = asyncio.Event()
        first = asyncio.ensure_future(cluster.generate("first"))
        await wait_until(lambda: len(cluster.calls()) == 1)
        call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="second"))
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate("third")
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhaustedError)
        assert error.retry_after >= 1
        tokenized = len(cluster.tokenizer.request_ids)
        for path, body in (("completions", {"prompt": "third"}), ("embeddings", {"input": "third"})):
            response = await cluster.http.post(f"/v1/{path}", json=body)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
        assert len(cluster.tokenizer.request_ids) == tokenized  # refused before anything was done for them
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        fourth = asyncio.ensure_future(cluster.generate("fourth"))
        await asyncio.sleep(0.1)
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
