"""The queue in front of busy workers: its order, its refusals, and that it loses nobody."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sapwood_common.errors import ResourceExhaustedError
from sapwood_router.admission.fair_queue import Admission, AdmissionSettings, Ticket
from sapwood_testing.clock import Clock

FAR = 1e9


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


def test_without_a_queue_a_request_is_refused_at_once() -> None:
    queue = Queue(most_waiting=0)
    with pytest.raises(ResourceExhaustedError, match="no request may wait") as caught:
        queue.enter("a")
    assert caught.value.retry_after is not None and caught.value.retry_after >= 1.0
    assert queue.admission.waiting == 0


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


def test_what_was_long_prepared_goes_after_who_came_meanwhile() -> None:
    """Fifty of a tenant are prepared while other requests of his go: they do not all go before who comes then."""
    queue = Queue()
    slow = [queue.enter(f"slow-{number}", tenant="many", ready=False) for number in range(50)]
    for number in range(100):
        queue.enter(f"quick-{number}", tenant="many")
    for _ in range(60):
        queue.admission.release()
    few = queue.enter("few", tenant="few", ready=False)
    for ticket in slow:
        queue.admission.ready(ticket)
    queue.admission.ready(few)
    assert queue.drain().index("few") - 60 <= 1
    assert len(queue.gone) == 151


def test_tenants_without_number_go_while_one_request_is_prepared() -> None:
    """Of tenants who have nothing in the queue some are forgotten, but not the queue."""
    queue = Queue(most_waiting=2)
    slow = queue.enter("slow", tenant="slow", ready=False)
    for number in range(20):
        queue.enter(f"{number}", tenant=f"tenant-{number}")
        queue.admission.release()
    queue.admission.ready(slow)
    assert queue.drain() == [*map(str, range(20)), "slow"]
    assert queue.admission.waiting == 0


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
    cost: float
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
        self.coming: dict[tuple[int, str], float] = {}
        """Of those that are not ready."""
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
        if served:
            self.virtual[plain.priority] = max(plain.start, self.virtual.get(plain.priority, 0.0))
        else:
            self.uncharged(plain)
        if not any(each.priority == plain.priority for each in self.waiting):
            self.virtual.pop(plain.priority, None)
            self.finish = {key: value for key, value in self.finish.items() if key[0] != plain.priority}
            self.coming = {key: value for key, value in self.coming.items() if key[0] != plain.priority}

    def uncharged(self, plain: Plain) -> None:
        """If its tenant has none of its kind after it, it counts for nothing."""
        key = plain.priority, plain.tenant
        if plain.ready and self.finish[key] == plain.finish:
            self.finish[key] = plain.start
        elif not plain.ready and self.coming.get(key) == plain.finish:
            del self.coming[key]

    def charged(self, plain: Plain) -> None:
        """It takes its place as one that comes now."""
        key = plain.priority, plain.tenant
        plain.start = max(self.virtual.get(plain.priority, 0.0), self.finish.get(key, 0.0))
        if not plain.ready:
            plain.start = max(plain.start, self.coming.get(key, 0.0))
        plain.finish = plain.start + plain.cost / WEIGHTS[plain.tenant]
        (self.finish if plain.ready else self.coming)[key] = plain.finish

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(0, 1), cost=st.integers(1, 9), ready=st.booleans())
    def enter(self, tenant: str, priority: int, cost: int, ready: bool) -> None:
        name = str(self.count)
        self.count += 1
        key = priority, tenant
        start = max(self.virtual.get(priority, 0.0), self.finish.get(key, 0.0), self.coming.get(key, 0.0))
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
        plain = Plain(name, tenant, priority, cost, 0.0, 0.0, ready)
        self.charged(plain)
        self.waiting.append(plain)

    @rule()
    def release(self) -> None:
        ready = [each for each in self.waiting if each.ready]
        assert self.queue.admission.release() == bool(ready)
        if ready:
            highest = max(each.priority for each in ready)
            # of the same start tag the one that came first
            first = min((each for each in ready if each.priority == highest), key=lambda each: each.start)
            assert self.queue.gone[-1] == first.name
            self.gone(first, served=True)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def prepared(self, data) -> None:
        plain = data.draw(st.sampled_from(self.waiting))
        self.queue.admission.ready(self.tickets[plain.name])
        if not plain.ready:
            self.uncharged(plain)
            plain.ready = True
            self.charged(plain)

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
