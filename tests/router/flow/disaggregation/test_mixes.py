"""``--disaggregate auto`` against ``always`` and ``never``: the router's own decision, costs, policy and accounts, in front of
workers that only take time, on a clock of the test's own."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

import pytest

from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.flow.disaggregation.costs import Costs
from sapwood_router.flow.disaggregation.decision import Disaggregate, Disaggregation, Part
from sapwood_router.flow.disaggregation.handoff import Timing
from sapwood_router.flow.select import choose
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policies.least_load import LeastLoad
from sapwood_router.routing.policy_book import PolicyBook

MODEL = "m"


class Speed(NamedTuple):
    """Seconds of a step, of each request that generates in it, and of each prompt token of which it computes so many at most."""

    step: float = 0.02
    a_row: float = 0.0002
    a_token: float = 0.00005
    chunk: int = 2048


class Mix(NamedTuple):
    """A load: prompts and answers by length, how many clients ask one after the other, and a hand-over's seconds: fixed, and for
    each token."""

    lengths: tuple[tuple[int, int], ...]
    clients: int
    handover: float = 0.005
    a_token: float = 0.000002


MIXES = {
    "chats": Mix(((200, 250), (500, 150)), 48),
    "documents": Mix(((8000, 60), (6000, 100)), 16),
    "chats beside documents": Mix(((300, 300), (300, 200), (8000, 100)), 32),
    "documents over a slow network": Mix(((8000, 100), (4000, 200)), 24, 0.05, 0.0002),
}


SPEEDS = {
    "8B": Speed(0.0033, 0.00009, 0.000029, 8192),
    "0.6B": Speed(0.0022, 0.00004, 0.0000055, 8192),
}
"""As measured on an H200 (``benchmarks/results/2026-11-27-h200-pairs-86463065.jsonl``)."""
MEASURED_MIXES = {
    "chats": Mix(((200, 250), (500, 150)), 48, 0.02, 0.000001),
    "documents": Mix(((8000, 60), (6000, 100)), 48, 0.02, 0.000001),
    "chats beside documents": Mix(((300, 300), (300, 200), (8000, 100)), 48, 0.02, 0.000001),
    "documents with long answers": Mix(((8000, 200), (4000, 400)), 48, 0.02, 0.000001),
}
"""Those of ``benchmarks/gpu/bench_pairs.py``."""
OTHER_MIXES = {
    "all lengths": Mix(((100, 50), (1000, 400), (3000, 100), (10_000, 600)), 48, 0.02, 0.000001),
    "few documents": Mix(((300, 200),) * 9 + ((16_000, 100),), 48, 0.02, 0.000001),
    "long documents": Mix(((16_000, 20), (12_000, 40)), 48, 0.02, 0.000001),
}


class Clock:
    """Time, and what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._ties), do))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] < until:
            self.now, _, do = heapq.heappop(self._due)
            do()


class Machine:
    """Steps as a worker's scheduler does: a chunk of the prompts in the queue and a token for each request that generates."""

    def __init__(self, clock: Clock, speed: Speed) -> None:
        self._clock, self._speed = clock, speed
        self._prompts: deque[tuple[list[int], Callable[[], None]]] = deque()
        self._ends: list[tuple[int, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._steps = 0
        self._busy = False

    def prefill(self, tokens: int, done: Callable[[], None]) -> None:
        self._prompts.append(([tokens], done))
        self._go()

    def generate(self, tokens: int, done: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (self._steps + self._busy + tokens, next(self._ties), done))
        self._go()

    def _go(self) -> None:
        if self._busy or not (self._prompts or self._ends):
            return
        self._busy = True
        speed, computed = self._speed, []
        room = speed.chunk
        for left, done in self._prompts:
            taken = min(room, left[0])
            left[0] -= taken
            room -= taken
            if not left[0]:
                computed.append(done)
            if not room:
                break
        seconds = speed.step + speed.a_row * len(self._ends) + speed.a_token * (speed.chunk - room)
        self._clock.after(seconds, lambda: self._stepped(computed))

    def _stepped(self, computed: list[Callable[[], None]]) -> None:
        self._busy = False
        self._steps += 1
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            ended.append(heapq.heappop(self._ends)[2])
        for _ in computed:
            self._prompts.popleft()
        for done in (*computed, *ended):
            done()
        self._go()


class Fleet:
    """A router's parts in front of machines, and clients that each ask again when they are answered."""

    def __init__(
        self,
        mode: Disaggregate,
        mix: Mix,
        pairs: int,
        speed: Speed = Speed(),  # noqa: B008 - it does not change
        seed: int = 7,
    ) -> None:
        self._again = True
        self.clock = Clock()
        self._mix = mix
        self._rng = random.Random(seed)
        self.registry = Registry([])
        self._machines: dict[str, Machine] = {}
        for role in (Role.PREFILL, Role.DECODE) * pairs:
            address = f"{role.value}:{len(self._machines)}"
            worker = Worker(address, CircuitBreaker(BreakerSettings(), self.clock), self.clock)
            self.registry.add(worker)
            self.registry.mark_up(worker, ServedModel(MODEL, 1 << 20, 1000, 16, 1 << 20, 1, role=role))
            self._machines[address] = Machine(self.clock, speed)
        self._policies = PolicyBook("least_load", {}, (), lambda name: LeastLoad(random.Random(1)), lambda *_: None)
        self.deciding = Disaggregation(mode, self.registry, self._policies, Costs(self.clock), random.Random(3))
        self.answered = self.handed_off = 0
        self.placed: list[str] = []
        """Who was asked, each time."""
        for _ in range(mix.clients):
            self.clock.after(self._rng.random(), self._ask)

    def burst(self, requests: int) -> float:
        """Seconds in which so many requests are answered that come at once."""
        self._again = False
        began = self.clock.now
        for _ in range(requests):
            self._ask()
        self.clock.run(math.inf)
        return self.clock.now - began

    def _ask(self) -> None:
        prompt, answer = self._rng.choice(self._mix.lengths)
        tokens = PromptPages(range(prompt))
        demand = Demand(MODEL, prompt, "prompt")
        decision = self.deciding.decide(demand, tokens, answer)
        part = Part.PREFILL if decision.disaggregated else Part.WHOLE
        roles = self.deciding.roles_for(part, decision)
        worker, lease = self._place(demand, tokens, roles, prompt, hands_off=decision.disaggregated)
        costs = self.deciding.costs_of(MODEL)
        timing = None if costs is None else Timing(costs, self.clock)
        if timing is not None:
            timing.sent(worker, part, prompt)

        def computed() -> None:
            lease.prefilled()
            if timing is not None:
                timing.answers()
            if decision.disaggregated:
                lease.release()
                self._hand_over(demand, tokens, answer, timing)
            else:
                self._generate(worker, lease, answer - 1, answer, timing)

        self._machines[worker.address].prefill(prompt, computed)

    def _hand_over(self, demand: Demand, tokens: PromptPages, answer: int, timing: Timing | None) -> None:
        self.handed_off += 1
        prompt = demand.tokens
        worker, lease = self._place(demand, tokens, self.deciding.roles_for(Part.DECODE), 1)
        if timing is not None:
            timing.handed_off()
            timing.sent(worker, Part.DECODE, prompt)

        def first() -> None:
            lease.prefilled()
            if timing is not None:
                timing.answers()
            self._generate(worker, lease, answer - 2, answer, timing)

        machine = self._machines[worker.address]
        self.clock.after(self._mix.handover + self._mix.a_token * prompt, lambda: machine.prefill(16, first))

    def _generate(self, worker: Worker, lease: Lease, left: int, answer: int, timing: Timing | None) -> None:
        def done() -> None:
            lease.release()
            if timing is not None:
                timing.ended(left + 1, answer)
            self.answered += 1
            if self._again:
                self._ask()

        self._machines[worker.address].generate(left, done)

    def _place(
        self, demand: Demand, tokens: PromptPages, roles: tuple[Role, ...], prefill: int, *, hands_off: bool = False
    ) -> tuple[Worker, Lease]:
        worker, _ = choose(demand, tokens, self.registry, self._policies.of(MODEL), roles)
        self.placed.append(worker.address)
        return worker, worker.lease(prefill, hands_off=hands_off)


def throughput(mode: Disaggregate, mix: Mix, pairs: int, speed: Speed = Speed(), until: float = 150) -> tuple[int, int]:  # noqa: B008 - it does not change
    """Answers from the 30th second, and the hand-overs of all."""
    fleet = Fleet(mode, mix, pairs, speed)
    fleet.clock.run(30)
    before = fleet.answered
    fleet.clock.run(until)
    return fleet.answered - before, fleet.handed_off


@pytest.mark.parametrize(("name", "pairs"), [*((name, 1) for name in MIXES), ("chats beside documents", 2)])
def test_auto_answers_as_many_requests_as_the_better_of_always_and_never(name: str, pairs: int) -> None:
    mix = MIXES[name]
    mix = mix._replace(clients=mix.clients * pairs)
    found = {mode: throughput(mode, mix, pairs) for mode in ("always", "never", "auto")}
    print(f"{name}, {pairs} + {pairs}: {found}")
    assert found["auto"][0] >= 0.98 * max(found["always"][0], found["never"][0])


@pytest.mark.parametrize("name", MEASURED_MIXES)
@pytest.mark.parametrize("model", SPEEDS)
def test_auto_does_so_with_the_steps_of_a_gpu(model: str, name: str) -> None:
    modes: tuple[Disaggregate, ...] = ("always", "never", "auto")
    found = {mode: throughput(mode, MEASURED_MIXES[name], 1, SPEEDS[model], 60) for mode in modes}
    print(f"{model}, {name}: {found}")
    assert found["auto"][0] >= 0.98 * max(found["always"][0], found["never"][0])


@pytest.mark.parametrize("name", MIXES)
def test_of_requests_that_come_at_once_none_is_weighed_as_if_it_came_alone(name: str) -> None:
    found = {mode: seconds_at_once(mode, MIXES[name])[0] for mode in ("always", "never", "auto")}
    print(f"{name}, 48 at once: {found}")
    assert found["auto"] <= min(found["always"], found["never"]) / 0.97  # the last of them ends it: chance has a part


@pytest.mark.parametrize("name", [*MEASURED_MIXES, *OTHER_MIXES])
@pytest.mark.parametrize("model", SPEEDS)
def test_requests_that_come_at_once_are_not_taken_for_those_to_come(model: str, name: str) -> None:
    mix = {**MEASURED_MIXES, **OTHER_MIXES}[name]
    modes: tuple[Disaggregate, ...] = ("always", "never", "auto")
    ratios = []
    for seed in range(10):
        found = {mode: seconds_at_once(mode, mix, SPEEDS[model], seed) for mode in modes}
        assert found["auto"] == found["never"], "each goes to the very worker to which it goes with never"
        ratios.append(min(found["always"][0], found["never"][0]) / found["auto"][0])
    print(f"{model}, {name}, 48 at once: {[round(ratio, 3) for ratio in ratios]}")
    assert mean(ratios) >= 0.99 and min(ratios) >= 0.95  # the last of them ends it: chance has a part


def seconds_at_once(
    mode: Disaggregate,
    mix: Mix,
    speed: Speed = Speed(),  # noqa: B008 - it does not change
    seed: int = 7,
) -> tuple[float, list[str]]:
    """Seconds in which 48 requests are answered that come at once, after twelve others, where hand-overs were measured; and who
    was asked for each."""
    fleet = Fleet(mode, mix._replace(clients=0), 1, speed, seed)
    costs = fleet.deciding.costs_of(MODEL)
    for prompt, _ in mix.lengths * 8 if costs else ():
        costs.handed_over(prompt, mix.handover + mix.a_token * prompt)
    fleet.burst(12)
    return fleet.burst(48), fleet.placed
