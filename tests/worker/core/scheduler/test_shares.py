"""How soon a tenant gets its first token, whatever others have sent: bounds in steps, with everything that steps may hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.drafts.scripted_drafter import ScriptedDrafter
from sapwood_testing.worker.fake_runner import continuation
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.scheduler.admission import PATIENCE
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.rank_planner import RankPlanner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.continuations import Continuation
from sapwood_worker.records.step import ModelOutput, Step

VOCAB = 50


@dataclass
class Loop:
    """Runs a scheduler as the event loop does, as far ahead as it may; every sampled token is 7, every draft is wrong."""

    scheduler: Scheduler | RankPlanner
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    steps: int = 0
    serial: int = 0
    asked: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    launched: list[Step] = field(default_factory=list)
    most_scored: int = 0

    def add(self, tenant: str, tokens: int, outputs: int = 1, **terms: object) -> int:
        return self.ask(tenant, [self.chance.randrange(VOCAB) for _ in range(tokens)], outputs, **terms)

    def ask(self, tenant: str, prompt: list[int], outputs: int = 1, **terms: object) -> int:
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
        request = Request(self.serial, f"{tenant} {self.serial}", prompt, sampling, tenant=tenant, **terms)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.asked[self.serial] = self.steps
        self.serial += 1
        return self.serial - 1

    def step(self) -> None:
        while self.launched and not self.scheduler.plans_ahead:
            self._take()
        planned = self.scheduler.schedule()
        if planned:
            self.launched.append(planned)
            self.steps += 1
            self.most_scored = max(self.most_scored, *(len(each.scored) for each in (planned, *planned.parts)))
        if self.launched and (not planned or len(self.launched) >= self.scheduler.depth):
            self._take()
        self.scheduler.check()

    def run(self, until: int) -> int:
        """Steps until a request has its first token; how many came after those in flight when it was asked."""
        while until not in self.first:
            self.step()
            assert self.steps < 5000
        return self.first[until] - self.asked[until]

    def _take(self) -> None:
        step = self.launched.pop(0)
        for output in self.scheduler.update(_answer(step)):
            if output.token_ids or output.finish_reason == "handoff":
                self.first.setdefault(output.serial, self.steps)
            if output.finish_reason is not None:
                self.ended[output.serial] = self.steps


def _answer(step: Step) -> ModelOutput:
    if step.parts:
        return ModelOutput(step.number, [], parts=tuple(_answer(part) for part in step.parts))
    tokens = [[7] for _ in step.samples.tolist()] if len(step.rows) else []
    return ModelOutput(step.number, tokens, scored=[-1.0] * len(step.scored))


def config(**settings: object) -> SchedulerConfig:
    usual = {"page_size": 4, "num_pages": 4000, "context_length": 4000, "max_running": 64, "max_step_tokens": 64}
    return SchedulerConfig(**(usual | settings))  # type: ignore[arg-type]


def made(kind: str, **terms: object) -> Loop:
    """A loop over a scheduler of a kind."""
    match kind:
        case "pipeline":
            return Loop(Scheduler(config(micro_batches=4, chained=True, **terms)))
        case "drafts":
            drafter = ScriptedDrafter(
                lambda request: continuation(request.token_ids[: request.prompt_length], request.sampling, VOCAB),
                random.Random(1),
                right=0.5,
                vocab_size=VOCAB,
            )
            return Loop(Scheduler(config(speculate="prefix", **terms), drafter=drafter))
        case "ranks":
            settings = config(**terms)
            return Loop(RankPlanner(settings, [Scheduler(settings) for _ in range(3)]))
        case "hand-offs":
            host = HostPages(4000)
            leases = TransferLeases(host, 4, b"f" * 32, 5, ":1", 600.0, lambda: 0.0)
            return Loop(Scheduler(config(**terms), HierarchicalCache(host, 4000, 4, leases=leases)))
        case "priorities":
            return Loop(Scheduler(config(policy="priority", **terms)))
        case _:
            return Loop(Scheduler(config(**terms)))


KINDS = ("plain", "pipeline", "drafts", "ranks", "priorities", "hand-offs")


@pytest.mark.parametrize("kind", KINDS)
@given(
    others=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2000)), min_size=1, max_size=8),
    short=st.integers(1, 60),
    streams=st.integers(0, 6),
    before=st.integers(0, 8),
)
@settings(deadline=None, max_examples=40)
def test_a_first_token_comes_in_as_many_steps_as_its_tenants_part_takes(
    kind: str, others: list[tuple[int, int]], short: int, streams: int, before: int
) -> None:
    loop = made(kind)
    terms: dict[str, Any] = {"hands_off": True} if kind == "hand-offs" else {}
    for _ in range(streams):
        loop.add("streams", 3, 1000)
    for _ in range(4 * bool(streams)):
        loop.step()
    for tenant, tokens in others:
        loop.add(f"t{tenant}", tokens, **terms)
    for _ in range(before):
        loop.step()
    bob = loop.add("bob", short, **terms)
    tenants = len({tenant for tenant, _ in others}) + 1 + bool(streams)
    part = (64 - streams) // tenants // 2
    bound = -(-short // part) + 2 * loop.scheduler.depth + 1
    if kind == "ranks":  # where prompts are held back, for as many steps as requests wait
        bound += streams + len(others) + short
    assert loop.run(bob) <= bound


@pytest.mark.parametrize("kind", ["plain", "pipeline", "drafts", "priorities"])
def test_a_tenant_of_which_nothing_runs_gets_a_row_of_one_that_has_many(kind: str) -> None:
    loop = made(kind, max_running=8)
    flood = [loop.add("alice", 9, 300) for _ in range(12)]
    for _ in range(30):
        loop.step()
    bob = loop.add("bob", 11)
    assert loop.run(bob) <= PATIENCE + 8
    others = [loop.add(f"t{number}", 11, 200) for number in range(7)]
    assert max(map(loop.run, others)) <= 8 * (PATIENCE + 8)
    assert loop.scheduler.num_preemptions <= 8  # type: ignore[union-attr]
    while loop.scheduler.has_work:
        loop.step()
    assert set(flood) <= set(loop.ended), "what was sent back ends, too"


def test_a_tenant_of_which_nothing_runs_gets_pages_of_one_that_has_them_all() -> None:
    loop = made("plain", num_pages=100, context_length=200, conservativeness=0.0)
    for _ in range(30):
        loop.add("alice", 12, 180)
    for _ in range(20):
        loop.step()
    assert loop.scheduler.load().running_requests > 10
    assert loop.run(loop.add("bob", 11)) <= PATIENCE + 8
    while loop.scheduler.has_work:
        loop.step()
    assert len(loop.ended) == loop.serial


def test_a_tenant_with_one_request_running_keeps_it() -> None:
    loop = made("plain", max_running=2)
    for name in ("alice", "bob"):
        loop.add(name, 5, 300)
    loop.step()
    carol = loop.add("carol", 5)
    for _ in range(200):
        loop.step()
    assert loop.scheduler.num_preemptions == 0 and carol not in loop.first  # type: ignore[union-attr]


def test_a_short_prompt_overtakes_long_ones_of_its_own_tenant() -> None:
    loop = made("plain")
    longs = [loop.add("", 2000) for _ in range(4)]
    for _ in range(5):
        loop.step()
    assert loop.run(loop.add("", 11)) <= 2
    assert not set(longs) & set(loop.first)


def test_a_short_prompt_overtakes_a_long_one_for_which_there_are_no_pages() -> None:
    loop = made("plain", num_pages=1000)
    longs = [loop.add("", 1500) for _ in range(4)]
    for _ in range(5):
        loop.step()
    assert loop.run(loop.add("", 11)) <= 2
    while loop.scheduler.has_work:
        loop.step()
    assert set(longs) <= set(loop.ended)


@pytest.mark.parametrize("tenants", [1, 4])
def test_short_prompts_without_end_leave_a_quarter_of_a_tenants_tokens_to_its_oldest(tenants: int) -> None:
    loop = made("plain", max_waiting=10_000)
    long = loop.add("t0", 1900)
    while long not in loop.first:
        for number in range(8):
            loop.add(f"t{number % tenants}", 30)
        loop.step()
    assert loop.first[long] <= 1900 / (64 // tenants // 4) * 1.1 + 2


def test_long_prompts_of_a_tenant_end_in_the_order_of_their_arrival_whatever_their_length() -> None:
    loop = made("plain")
    longs = [loop.add("", tokens) for tokens in (900, 300, 600, 200)]
    while loop.scheduler.has_work:
        loop.step()
    assert sorted(longs, key=lambda each: loop.first[each]) == longs


def test_the_next_turn_of_a_cached_session_overtakes_prompts_that_are_computed_from_their_beginning() -> None:
    loop = made("plain")
    turn = [loop.chance.randrange(VOCAB) for _ in range(600)]
    loop.run(loop.ask("", turn))
    longs = [loop.add("", 500) for _ in range(4)]
    for _ in range(3):
        loop.step()
    assert loop.run(loop.ask("", [*turn, 7, *range(10)])) <= 3
    assert not set(longs) & set(loop.first)


def test_a_running_prompt_of_a_low_priority_gets_on_once_it_has_starved() -> None:
    loop = made("priorities", starved_after=20, max_waiting=10_000)
    low = loop.add("low", 500, priority=-1)
    loop.step()
    while low not in loop.first:
        for _ in range(4):
            loop.add("high", 40, priority=1)
        loop.step()
        assert loop.steps < 100
    assert loop.first[low] > 20, "before, priorities count"


@pytest.mark.parametrize("kind", ["plain", "pipeline", "priorities"])
def test_a_long_continuation_is_scored_by_an_eighth_of_a_steps_tokens(kind: str) -> None:
    """A step of 512 such tokens took 2.3 s on two cores, in which another tenant's first token waited."""
    loop = made(kind)
    node = Continuation(-1, [loop.chance.randrange(VOCAB) for _ in range(1000)])
    tree = loop.ask("alice", [1, 2, 3], continuations=[node])
    for _ in range(5):
        loop.step()
    assert loop.run(loop.add("bob", 11)) <= 2 * loop.scheduler.depth + 2
    while tree not in loop.ended:
        loop.step()
    assert 0 < loop.most_scored <= 64 // 2 // 4


def test_a_prompt_before_continuations_is_computed_as_any_other() -> None:
    loop = made("plain")
    tree = loop.ask("", [loop.chance.randrange(VOCAB) for _ in range(640)], continuations=[Continuation(-1, [5, 6])])
    while tree not in loop.ended:
        loop.step()
    assert loop.steps <= 640 // 64 + 2
