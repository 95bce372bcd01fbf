"""Costs are what was measured: nothing is assumed, and what is old counts less."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import PROBE_SECONDS, Costs, LinearFit
from sapwood_router.flow.disaggregation.decision import LEARN_SECONDS, Disaggregation, Part
from sapwood_router.flow.disaggregation.handoff import Timing
from sapwood_router.flow.disaggregation.weighing import Estimate
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policies.least_load import LeastLoad
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.routing.worker_view import Load

PROMPT = PromptPages(range(1000))
DEMAND = Demand("m", 1000, "prompt")


class Pair:
    """A prefill and a decode worker, and what decides between them."""

    def __init__(self) -> None:
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        registry = self.registry = Registry([])
        self.workers = {}
        for role in (Role.PREFILL, Role.DECODE):
            worker = self.workers[role] = Worker(role.value, CircuitBreaker(BreakerSettings(), clock), clock)
            registry.add(worker)
            registry.mark_up(worker, ServedModel("m", 1 << 20, 1000, 16, 1 << 20, 1, role=role))
        policies = PolicyBook("least_load", {}, (), lambda name: LeastLoad(random.Random(1)), lambda *_: None)
        self.deciding = Disaggregation("auto", registry, policies, Costs(clock))
        costs = self.deciding.costs_of("m")
        assert costs is not None
        self.costs = costs

    def measure(self, handover: float | None = None) -> None:
        """0.1 s for each 1000 tokens of a prompt, 10 ms for a token of an answer."""
        for tokens in (500, 1000, 2000) * 3:
            self.costs.prefilled(tokens, tokens * 1e-4)
            if handover is not None:
                self.costs.handed_over(tokens, handover)
        for requests in (1, 10):
            self.costs.generated(100, 1.0, requests, 0.0)
        self.costs.answered(101)

    def load(self) -> None:
        """Makes a pair the best choice, if a hand-over takes little."""
        self.workers[Role.PREFILL].lease(
            20_000
        ).release()  # prompts take a fifth of its time: who generates there waits
        self.workers[Role.DECODE].lease(1).prefilled()  # somebody whom a prompt there would delay

    def generates_everywhere(self) -> None:
        """One request at each worker."""
        for worker in self.workers.values():
            worker.lease(1).prefilled()

    def weighed(self) -> dict[tuple[str, str], Estimate]:
        """What each way would cost, by who computes the prompt and who else generates."""
        estimates = self.deciding.decide(DEMAND, PROMPT, 100).estimates
        return {(estimate.worker, estimate.decode_worker): estimate for estimate in estimates}

    def decide(self) -> bool:
        return self.deciding.decide(DEMAND, PROMPT, 100).disaggregated


def test_a_fit_finds_what_is_fixed_and_what_grows() -> None:
    fit = LinearFit()
    for size in (100, 200, 400, 800) * 3:
        fit.add(size, 0.05 + size * 0.001)
    assert fit.at(0) == pytest.approx(0.05)
    assert fit.at(1600) == pytest.approx(1.65)


def test_sizes_that_are_all_alike_are_scaled_and_nothing_is_negative() -> None:
    fit = LinearFit()
    for _ in range(5):
        fit.add(100, 0.2)
    assert fit.at(200) == pytest.approx(0.4)
    falling = LinearFit()
    for size, seconds in ((100, 0.4), (200, 0.2), (300, 0.1)):
        falling.add(size, seconds)
    assert falling.at(10_000) >= 0 and falling.at(0) >= 0


def test_what_was_measured_last_counts_most() -> None:
    fit = LinearFit()
    for seconds in (1.0,) * 300 + (2.0,) * 300:
        fit.add(1, seconds)
    assert fit.at(1) == pytest.approx(2.0, rel=0.01)


def test_a_hand_over_is_made_where_it_pays() -> None:
    for handover, pays in ((0.001, True), (5.0, False)):
        pair = Pair()
        pair.measure(handover)
        assert not pair.decide()
        pair.load()
        assert pair.decide() == pays


def test_until_hand_overs_are_measured_one_is_begun_now_and_then_where_it_could_pay() -> None:
    pair = Pair()
    pair.load()
    assert not pair.decide()  # nothing is known at all
    pair.measure()
    assert pair.decide()
    waiting = pair.deciding.decide(DEMAND, PROMPT, 100)
    assert not waiting.disaggregated
    assert pair.deciding.roles_for(Part.WHOLE, waiting) == ()
    pair.now += LEARN_SECONDS + 0.1
    assert pair.decide() and not pair.decide()
    idle = Pair()
    idle.measure()
    assert not idle.decide()


def test_requests_that_come_at_once_are_not_weighed_and_the_policy_chooses() -> None:
    pair = Pair()
    pair.measure(handover=0.001)
    leases = [pair.workers[Role.DECODE].lease(1000) for _ in range(3)]
    decision = pair.deciding.decide(DEMAND, PROMPT, 100)
    assert not decision.disaggregated and not decision.estimates
    assert pair.deciding.roles_for(Part.WHOLE, decision) == ()
    for lease in leases:
        lease.prefilled()
    assert pair.weighed()


def test_embeddings_wait_for_no_first_token_and_nobody_generates_beside_them() -> None:
    pair = Pair()
    pair.measure(handover=0.001)
    pair.generates_everywhere()
    alone = pair.weighed()["decode", ""]
    leases = [pair.workers[Role.DECODE].lease(1000, embeds=True) for _ in range(3)]
    beside = pair.weighed()["decode", ""]
    assert (beside.generate, beside.crowding) == (alone.generate, alone.crowding)
    assert beside.prefill > alone.prefill
    for lease in leases:
        lease.release()
    assert pair.workers[Role.DECODE].embedding == 0


def test_in_an_idle_fleet_the_policy_chooses_even_where_a_hand_over_is_due() -> None:
    pair = Pair()
    pair.measure(handover=0.001)
    pair.now += PROBE_SECONDS + 1
    pair.workers[Role.PREFILL].lease(20_000).release()  # a pair would spare it what prompts take of its steps
    decision = pair.deciding.decide(DEMAND, PROMPT, 100)
    assert not decision.disaggregated and not decision.estimates
    assert pair.deciding.roles_for(Part.WHOLE, decision) == ()
    pair.workers[Role.DECODE].report(Load(running_requests=1))  # another router's
    assert pair.decide()


def test_what_is_not_weighed_is_placed_as_without_roles() -> None:
    pair = Pair()
    for prompt, tokens in ((PromptPages(range(8)), 100), (PROMPT, 1)):
        decision = pair.deciding.decide(DEMAND, prompt, tokens)
        assert not decision.disaggregated
        assert pair.deciding.roles_for(Part.WHOLE, decision) == ()


def test_a_hand_over_is_measured_without_the_prompts_that_it_waits_for() -> None:
    pair = Pair()
    pair.measure(handover=0.02)
    decode = pair.workers[Role.DECODE]
    decode.lease(30_000)
    for _ in range(300):
        timing = Timing(pair.costs, lambda: pair.now)
        timing.handed_off()
        lease = decode.lease(1)
        timing.sent(decode, Part.DECODE, 1000)
        pair.now += 3.0 + 0.05
        timing.answers()
        lease.release()
    assert pair.costs.handover(1000) == pytest.approx(0.05, rel=0.05)


def test_slow_first_steps_of_one_worker_do_not_send_others_requests_elsewhere() -> None:
    pair = Pair()
    pair.measure(handover=5.0)
    pair.costs.prefilled(1000, 2.0)  # whichever worker it was
    pair.generates_everywhere()
    alone = pair.weighed()
    assert alone["prefill", ""].prefill == alone["decode", ""].prefill


def test_whoever_is_to_do_it_alone_is_the_one_who_costs_least() -> None:
    pair = Pair()
    pair.measure(handover=5.0)
    for _ in range(2):
        pair.workers[Role.PREFILL].lease(1).prefilled()
    pair.workers[Role.DECODE].lease(50_000)
    decision = pair.deciding.decide(DEMAND, PROMPT, 100)
    assert decision.reason == "a prefill worker alone costs less"
    assert pair.deciding.roles_for(Part.WHOLE, decision)[0] is Role.PREFILL


def test_where_all_cost_nearly_the_same_alone_the_policy_chooses_among_all() -> None:
    pair = Pair()
    pair.measure(handover=5.0)
    pair.generates_everywhere()
    decision = pair.deciding.decide(DEMAND, PROMPT, 100)
    assert decision.reason == "any worker alone costs less"
    assert pair.deciding.roles_for(Part.WHOLE, decision) == ()


def test_one_request_measures_old_costs_again_and_explaining_counts_as_none() -> None:
    pair = Pair()
    pair.measure(handover=5.0)
    pair.now += PROBE_SECONDS + 1
    assert not pair.decide()  # it would gain nothing
    pair.load()
    assert pair.deciding.decide(DEMAND, PROMPT, 100, probe=False).disaggregated
    assert pair.decide()
    assert not pair.decide()


def test_slow_first_hand_overs_are_disproved_by_a_few_later_ones() -> None:
    pair = Pair()
    pair.measure()
    for seconds in (5.0, 3.0, *(0.02,) * 7):
        pair.costs.handed_over(1000, seconds)
    probes = 0
    pair.load()
    while probes < 100 and not pair.decide():
        pair.now += PROBE_SECONDS + 0.1
        pair.load()
        assert pair.decide(), "one is due, to be measured"
        pair.costs.handed_over(1000, 0.02)
        probes += 1
    assert 1 <= probes <= 8


def test_prompts_slow_decodes_beside_them_and_not_requests_queued_behind() -> None:
    pair = Pair()
    pair.measure(handover=0.001)
    for _ in range(2):
        pair.workers[Role.DECODE].lease(1).prefilled()
    alone = pair.weighed()["prefill", ""]
    lease = pair.workers[Role.PREFILL].lease(50_000, hands_off=True)
    behind = pair.weighed()["prefill", ""]
    assert behind.prefill == pytest.approx(alone.prefill + 5.0)
    assert (behind.generate, behind.delay) == (alone.generate, 0.0)
    lease.prefilled()
    lease.release()
    beside = pair.weighed()["prefill", ""]  # as much is expected of the next seconds
    assert beside.generate > 1.2 * alone.generate
    assert beside.delay > 0


def test_a_pair_waits_for_the_decode_workers_longer_computation() -> None:
    pair = Pair()
    pair.measure(handover=0.02)
    for _ in range(2):
        pair.workers[Role.PREFILL].lease(1).prefilled()
    assert pair.weighed()["prefill", "decode"].transfer == pytest.approx(0.02)
    pair.workers[Role.DECODE].lease(20_000)
    assert pair.weighed()["prefill", "decode"].transfer == pytest.approx(0.02 + 2.0 - 0.1)


def test_only_workers_whose_pages_fit_are_weighed_as_a_pair() -> None:
    pair = Pair()
    pair.measure(handover=0.001)
    pair.load()
    for role, pages in ((Role.PREFILL, b"one"), (Role.DECODE, b"other")):
        model = pair.workers[role].model
        assert model is not None
        pair.registry.mark_up(pair.workers[role], replace(model, pages=pages))
    assert ("prefill", "decode") not in pair.weighed()
    stranger = Worker("stranger", CircuitBreaker(BreakerSettings(), lambda: pair.now), lambda: pair.now)
    pair.registry.add(stranger)
    pair.registry.mark_up(stranger, ServedModel("m", 1 << 20, 1000, 16, 1 << 20, 1, role=Role.PREFILL, pages=b"other"))
    stranger.lease(30_000)  # it has a queue, and is the only one that fits
    pair.workers[Role.DECODE].lease(1).prefilled()  # enough generate for costs to be weighed
    assert [way for way in pair.weighed() if way[1]] == [("stranger", "decode")]
