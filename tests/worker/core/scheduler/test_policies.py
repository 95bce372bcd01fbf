"""In which order requests are admitted, what pushes one out, and how long one can be made to wait."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ResourceExhaustedError
from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.waiting import MOST_IDLE, TenantFairness
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput

VOCAB = 50


class Driver:
    """Runs a scheduler over a FakeRunner; remembers in which step each request was in a batch first and when it ended."""

    def __init__(self, **settings: object) -> None:
        config = SchedulerConfig(**({"page_size": 4, "num_pages": 64, "context_length": 128} | settings))  # type: ignore[arg-type]
        self.now = 0.0
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=config.context_length,
            vocab_size=VOCAB,
            eos_token_ids=(),
            page_size=config.page_size,
            num_pages=config.num_pages,
        )
        self.runner = FakeRunner(info)
        self.names: list[str] = []
        self.started: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.tokens: Counter[str] = Counter()
        self.steps = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, **terms: object) -> None:
        self.names.append(name)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(len(self.names) - 1, name, prompt, params, **terms))  # type: ignore[arg-type]

    def step(self) -> list[str]:
        """The names in the batch."""
        self.take(self.scheduler.expire())
        planned = self.scheduler.schedule()
        batch = self.scheduler.in_flight()
        for name in batch:
            self.started.setdefault(name, self.steps)
        if batch:
            self.take(self.scheduler.update(self.runner.execute(planned)))
        self.scheduler.check()
        self.steps += 1
        return batch

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.tokens[self.names[output.serial]] += len(output.token_ids)
            if output.finish_reason is not None:
                self.ended[self.names[output.serial]] = self.steps
                self.reasons[self.names[output.serial]] = output.finish_reason

    def run(self) -> list[str]:
        """All names, in the order in which they started."""
        while self.scheduler.has_work:
            self.step()
        return sorted(self.started, key=lambda name: self.started[name])


def test_longest_prefix_goes_first() -> None:
    driver = Driver(policy="lpm", max_running=1)
    driver.add("warm", list(range(16)))
    driver.run()
    driver.add("cold", [40, 41])
    driver.add("some", [*range(8), 40])
    driver.add("most", [*range(12), 40])
    assert driver.run() == ["warm", "most", "some", "cold"]


def test_dfs_weight_finishes_the_branch_with_the_most_requests_first() -> None:
    driver = Driver(policy="dfs-weight")
    driver.add("left", [1] * 8)
    driver.add("right", [2] * 8 + [3] * 4)
    driver.run()
    driver.add("fork", [2] * 8 + [4] * 4)
    driver.run()
    driver.add("left 1", [1] * 8 + [9])
    driver.add("right 1", [2] * 8 + [9])
    driver.add("cold", [7])
    driver.add("left 2", [1] * 8 + [8])
    driver.add("right deep", [2] * 8 + [3] * 4 + [9])
    driver.add("left 3", [1] * 8 + [7])
    assert driver.scheduler.load().waiting_requests == 6
    assert driver.step() == ["left 1", "left 2", "left 3", "right deep", "right 1", "cold"]


def test_longest_output_goes_first() -> None:
    driver = Driver(policy="lof", max_running=1)
    for length in (3, 9, 5):
        driver.add(f"{length}", [1], max_tokens=length)
    assert driver.run() == ["9", "5", "3"]


def test_a_higher_priority_goes_first_and_pushes_a_lower_one_out() -> None:
    driver = Driver(policy="priority", max_running=2)
    driver.add("low 1", [1] * 9, max_tokens=40, priority=-1)
    driver.add("low 2", [2] * 9, max_tokens=40, priority=-1)
    for _ in range(5):
        driver.step()
    driver.add("normal", [3] * 9, max_tokens=10)
    driver.add("high", [4] * 9, max_tokens=10, priority=5)
    assert sorted(driver.step()) == ["high", "low 1"], "one gives way in a step"
    assert sorted(driver.step()) == ["high", "normal"]
    assert driver.scheduler.num_preemptions == 2
    driver.run()
    assert driver.ended["high"] <= driver.ended["normal"] < driver.ended["low 1"] <= driver.ended["low 2"]
    assert driver.tokens == {"low 1": 40, "low 2": 40, "normal": 10, "high": 10}


def test_a_priority_pushes_out_for_pages_too_and_never_an_equal_one() -> None:
    driver = Driver(policy="priority", num_pages=8, context_length=32, conservativeness=0.0)
    driver.add("low", [1] * 24, max_tokens=4)
    driver.step()
    driver.add("equal", [2] * 24, max_tokens=4)
    assert driver.step() == ["low"]
    driver.add("high", [3] * 24, max_tokens=4, priority=1)
    assert driver.step() == ["high"]
    assert driver.run() == ["low", "high", "equal"]
    assert driver.ended["low"] < driver.ended["equal"]


def test_a_random_order_is_another_than_that_of_arrival_and_misses_nobody() -> None:
    driver = Driver(policy="random", max_running=1)
    names = [f"request {number}" for number in range(40)]
    for number, name in enumerate(names):
        driver.add(name, [number % VOCAB])
    ended = driver.run()
    assert sorted(ended) == sorted(names)
    overtaken = sum(one > other for one, other in itertools.combinations([names.index(each) for each in ended], 2))
    assert 0.3 < overtaken / (40 * 39 / 2) < 0.7


def test_without_the_policy_priorities_do_not_count() -> None:
    driver = Driver(max_running=1)
    driver.add("first", [1])
    driver.add("second", [2], priority=9)
    assert driver.run() == ["first", "second"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"])
def test_a_tenant_with_many_requests_does_not_delay_another(policy: str) -> None:
    driver = Driver(policy=policy, max_running=2)
    for number in range(60):
        driver.add(f"flood {number}", [1, 2, number % VOCAB], max_tokens=4, tenant="flood")
    for _ in range(6):
        driver.step()
    for number in range(4):
        driver.add(f"quiet {number}", [3, number], max_tokens=4, tenant="quiet")
    driver.run()
    last = max(driver.ended[f"quiet {number}"] for number in range(4))
    ahead = sum(ended < last for name, ended in driver.ended.items() if name.startswith("flood"))
    assert ahead < 15, "half of what runs from then on is the quiet tenant's"


def test_tenants_that_always_have_requests_get_equal_shares() -> None:
    driver = Driver(max_running=4, max_waiting=10_000)
    chance = random.Random(5)
    for number in range(400):
        driver.add(f"a {number}", [1], max_tokens=4, tenant="a")
        driver.add(f"a too {number}", [2], max_tokens=4, tenant="a")
        driver.add(f"b {number}", [3] * 40, max_tokens=chance.randint(1, 40), tenant="b")
        driver.add(f"c {number}", [4] * chance.randint(1, 9), max_tokens=8, tenant="c")
    served = Counter[str]()
    while not served or max(served.values()) < 1500:
        driver.step()
        served = Counter({t: int(driver.scheduler._fairness.served(t)) for t in "abc"})
    assert max(served.values()) - min(served.values()) < 4 * (40 + 40)


def test_a_tenant_saves_nothing_up_by_idling_and_few_idle_ones_are_kept() -> None:
    fairness = TenantFairness()
    fairness.arrived("busy")
    fairness.charge("busy", 100)
    fairness.arrived("late")
    assert fairness.served("late") == 100
    fairness.charge("late", 50)
    fairness.ended("late")
    fairness.arrived("late")
    assert fairness.served("late") == 150, "nor does it lose what it owes"
    for number in range(2 * MOST_IDLE):
        fairness.arrived(f"t{number}")
        fairness.ended(f"t{number}")
    assert len(fairness._counters) == MOST_IDLE + 2


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "lof", "priority"])
@pytest.mark.parametrize("starved_after", [16, 100])
def test_adversarial_arrivals_delay_a_request_only_until_it_starves(policy: str, starved_after: int) -> None:
    driver = Driver(policy=policy, max_running=1, starved_after=starved_after)
    driver.add("warm", list(range(16)))
    driver.run()
    start = driver.steps
    driver.add("victim", [40], max_tokens=2)
    number = 0
    while "victim" not in driver.ended:
        # Preferred by every policy but fcfs: a long cached prefix, a long output, a high priority.
        driver.add(f"rival {number}", [*range(16), number % VOCAB], max_tokens=3, priority=1)
        driver.step()
        number += 1
        assert number < 10 * starved_after
    waited = driver.started["victim"] - start
    assert starved_after <= waited <= starved_after + 4, "it waits until it starves and for the one that runs then"


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"])
@pytest.mark.parametrize("owes", [False, True], ids=["even", "ahead of its share"])
def test_ever_new_tenants_delay_a_request_only_until_it_starves(policy: str, owes: bool) -> None:
    driver = Driver(policy=policy, max_running=1, starved_after=50)
    if owes:  # its tenant has got more than what new ones begin with
        driver.add("new 0", [1], tenant="a0")
        driver.add("before", [2] * 60, max_tokens=20, tenant="victim")
        while "before" not in driver.ended:
            driver.step()
            driver.add(f"early {driver.steps}", [1], tenant=f"a early {driver.steps}")
            assert driver.steps < 500
    for number in range(3):
        driver.add(f"victim {number}", [40, number], max_tokens=2, tenant="victim")
    start = driver.steps
    ahead = driver.scheduler.load().waiting_requests
    number = 0
    while "victim 2" not in driver.ended:
        # Names that sort before the victim's, each with nothing to its account.
        driver.add(f"new {number + 1}", [1, 2, number % VOCAB], max_tokens=2, tenant=f"a{number:06}")
        driver.step()
        number += 1
        assert number < 3 * 50 + 4 * ahead
    waits = [driver.started[f"victim {number}"] - start for number in range(3)]
    print(f"{policy}: longest wait of the first {waits[0]}, of the third {waits[2]} steps")
    assert all(waits[number] <= (number + 1) * (50 + 2) + 2 * ahead for number in range(3))


def test_a_starved_tenant_has_one_turn_in_its_time_not_all_its_queue() -> None:
    driver = Driver(max_running=1, starved_after=10, max_waiting=500)
    for number in range(200):
        driver.add(f"flood {number}", [1, number % VOCAB], max_tokens=2, tenant="flood")
    while driver.steps < 40:
        driver.step()
    for number in range(20):
        driver.add(f"quiet {number}", [2, number], max_tokens=2, tenant="quiet")
    driver.run()
    last = driver.ended["quiet 19"]
    ahead = sum(40 < ended < last for name, ended in driver.ended.items() if name.startswith("flood"))
    assert ahead < 30, "all of the flood starves, and still the quiet tenant has its half"


def test_a_starved_request_is_not_pushed_out_again() -> None:
    driver = Driver(policy="priority", max_running=1, starved_after=10)
    driver.add("low", [1], max_tokens=100)
    driver.step()
    for number in range(200):
        driver.add(f"high {number}", [2, number % VOCAB], max_tokens=2, priority=1)
        driver.step()
        if "low" in driver.ended:
            break
    assert driver.ended["low"] < 140
    assert driver.scheduler.num_preemptions == 1


def test_deadlines_end_requests_in_the_queue_and_while_they_run() -> None:
    driver = Driver(max_running=1)
    driver.add("runs", [1] * 9, max_tokens=50, deadline=5.0)
    driver.add("waits", [2] * 9, max_tokens=50, deadline=3.0)
    driver.add("makes it", [3] * 9, max_tokens=5, deadline=100.0)
    driver.add("has none", [4] * 9, max_tokens=5)
    while driver.scheduler.has_work:
        driver.step()
        driver.now += 1.0
    assert driver.reasons == {"runs": "deadline", "waits": "deadline", "makes it": "length", "has none": "length"}
    assert (driver.ended["waits"], driver.ended["runs"], driver.tokens["waits"]) == (3, 5, 0)
    assert driver.tokens["runs"] == 5
    driver.scheduler.check_idle()


def test_a_pause_keeps_what_runs_or_sends_it_back() -> None:
    for retract in (False, True):
        driver = Driver()
        driver.add("a", [1] * 9, max_tokens=20)
        for _ in range(3):
            driver.step()
        driver.scheduler.pause(retract=retract)
        assert driver.step() == []
        driver.add("b", [2] * 9, max_tokens=20)
        assert driver.step() == []
        held = driver.scheduler.load().used_pages - driver.scheduler.load().evictable_pages
        assert (held == 0) == retract
        driver.scheduler.resume()
        driver.run()
        assert driver.tokens == {"a": 20, "b": 20}


def test_a_pinned_prefix_outlives_pressure_and_flush_until_it_is_unpinned() -> None:
    driver = Driver(num_pages=32, context_length=64)
    prefix = list(range(33))
    assert driver.scheduler.pin("system", prefix) == 0, "nothing is cached yet"
    driver.add("warm", prefix)
    driver.run()
    assert driver.scheduler.pin("system", prefix) == 32
    for number in range(20):
        driver.add(f"other {number}", [number] * 60)
    driver.run()
    driver.scheduler.flush_cache()
    assert driver.scheduler.load().used_pages == 8
    before = driver.scheduler.load().cached_tokens
    driver.add("again", [*prefix, 1])
    driver.run()
    assert driver.scheduler.load().cached_tokens - before == 32
    assert driver.scheduler.unpin("system")
    assert not driver.scheduler.unpin("system")
    driver.scheduler.flush_cache()
    assert driver.scheduler.load().used_pages == 0
    driver.scheduler.check_idle()


def test_a_pin_ends_with_its_time_and_leaves_room_for_the_longest_request() -> None:
    driver = Driver(num_pages=32, context_length=96)  # of 32 pages a request may need 24
    driver.add("warm", [1] * 41)
    driver.run()
    with pytest.raises(ResourceExhaustedError, match="at most 8"):
        driver.scheduler.pin("too much", [1] * 41)
    assert driver.scheduler.pin("short", [1] * 32, seconds=5.0) == 32
    assert driver.scheduler.pin("within it", [1] * 20) == 20, "shared pages count once"
    driver.add("longest", [2] * 90, max_tokens=6)
    driver.run()
    assert driver.tokens["longest"] == 6
    driver.now = 6.0
    driver.scheduler.expire()
    driver.scheduler.check()
    driver.scheduler.flush_cache()
    assert driver.scheduler.load().used_pages == 5


def test_requests_of_different_namespaces_share_nothing() -> None:
    driver = Driver()
    for name, namespace in (("a", b""), ("b", b"salt"), ("c", b"salt")):
        driver.add(name, [1] * 17, namespace=namespace)
        driver.run()
    load = driver.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens, load.used_pages) == (51, 16, 10)
