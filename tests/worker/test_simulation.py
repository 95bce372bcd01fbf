"""The scheduler's core in a deterministic simulation: seeded random traffic, every invariant checked after every step.

A seed decides everything; a failure names its seed and step, and the same seed fails there again. Checked after each step: the
ledger against tree and rows, page by page; locks; states. Checked for each request: its tokens are those of its own text and
seed, it ends exactly once, and no later than the bound that seniority gives it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.model_info import ModelInfo
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.config import SchedulerConfig
from sapwood_worker.scheduler.fake_runner import FakeRunner, continuation
from sapwood_worker.scheduler.output import RequestOutput
from sapwood_worker.scheduler.policy import STARVED_AFTER
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.scheduler import Scheduler

VOCAB = 60
END = 59
POISON = 58


@dataclass
class Client:
    """What a request's client knows and expects."""

    name: str
    expected: Iterator[int]
    longest: int
    max_tokens: int
    ends: frozenset[int]
    prompt_length: int
    added: int
    deadline: int | None
    received: list[int] = field(default_factory=list)


class Simulation:
    """One scheduler under one seed's traffic."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        page_size = chance.choice([1, 2, 4, 16])
        context_length = chance.randint(12, 96)
        # From less than one longest request to three of them.
        num_pages = max(3, int(context_length * chance.uniform(0.8, 3) / page_size))
        self.config = SchedulerConfig(
            page_size=page_size,
            num_pages=num_pages,
            context_length=context_length,
            eos_token_ids=frozenset({END}),
            max_running=chance.choice([1, 4, 8, 16]),
            max_waiting=chance.randint(1, 200),
            max_step_tokens=chance.choice([1, 8, 32, 512]),
            policy=chance.choice(["fcfs", "lpm"]),
            prefix_cache=chance.random() < 0.85,
            eviction=chance.choice(["lru", "lfu", "fifo", "slru"]),
            conservativeness=chance.choice([0.0, 0.0, 1.0]),
        )
        self.limit = min(self.config.context_length, num_pages * page_size)
        self.scheduler = Scheduler(self.config)
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=self.limit,
            vocab_size=VOCAB,
            eos_token_ids=(END,),
            page_size=page_size,
            num_pages=num_pages,
        )
        self.runner = FakeRunner(info, poison=POISON)
        # How busy: from mostly idle to always full.
        self.arrival_rate = chance.choice([0.05, 0.3, 1.0])
        self.abort_rate = chance.choice([0.0, 0.02, 0.2])
        self.lengths = chance.choice([[1, 2], [5, 20], [1, 20, 1000], [1000]])
        self.poison_rate = chance.choice([0.0, 0.0, 0.0, 0.01])
        self.documents = [self._tokens(chance.randint(1, 1 + self.limit // 3)) for _ in range(chance.randint(1, 6))]
        self.clients: dict[int, Client] = {}
        self.serial = 0
        self.step_number = 0
        self.counts = dict.fromkeys(("finished", "aborted", "failed", "refused"), 0)

    def run(self, steps: int) -> None:
        """Lets traffic come for ``steps`` steps, then waits for the last request and checks that nothing is left."""
        for _ in range(steps):
            self.arrivals()
            self.step()
        while self.scheduler.has_work:
            self.step()
        assert not self.clients, "a request never ended"
        self.scheduler.flush_cache()
        assert self.scheduler.load().used_pages == 0

    def arrivals(self) -> None:
        chance = self.chance
        while chance.random() < self.arrival_rate / (1 + self.arrival_rate):
            self.add()
        if chance.random() < self.abort_rate and self.clients:
            self.abort()
        if chance.random() < 0.01:
            self.scheduler.flush_cache()

    def add(self) -> None:
        chance = self.chance
        document = chance.choice(self.documents)
        prompt = list(document)  # asked for again as it is, or its beginning with something new
        if chance.random() < 0.7:
            prompt = prompt[: chance.randint(0, len(document))] + self._tokens(chance.randint(1, 8))
        prompt = prompt[: self.limit - 1]
        if chance.random() < self.poison_rate:
            prompt[0] = POISON
        sampling = SamplingParams(
            seed=chance.getrandbits(64),
            max_tokens=chance.choice(self.lengths),
            stop_token_ids=tuple(chance.sample(range(VOCAB), chance.randint(0, 2))) if chance.random() < 0.3 else (),
            ignore_eos=chance.random() < 0.5,
        )
        serial, self.serial = self.serial, self.serial + 1
        request = Request(serial, f"r{serial}", prompt, sampling, chance.choice([b"", b"", b"tenant"]))
        try:
            self.scheduler.add(request)
        except ResourceExhaustedError:
            assert self.scheduler.load().waiting_requests >= self.config.max_waiting
            self.counts["refused"] += 1
            return
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.config.eos_token_ids)
        self.clients[serial] = Client(
            name=request.request_id,
            expected=continuation(prompt, sampling, VOCAB),
            longest=min(self.limit, len(prompt) + sampling.max_tokens),
            max_tokens=sampling.max_tokens,
            ends=ends,
            prompt_length=len(prompt),
            added=self.step_number,
            deadline=None,
        )
        if self.config.policy == "fcfs":
            self.clients[serial].deadline = self.bound()

    def bound(self) -> int:
        """The step by which all requests of now have ended if they were served one after another, oldest first."""
        return self.step_number + sum(client.longest + 2 for client in self.clients.values())

    def abort(self) -> None:
        serial = self.chance.choice(list(self.clients))
        assert self.scheduler.abort(serial)
        assert not self.scheduler.abort(serial)
        del self.clients[serial]
        self.counts["aborted"] += 1

    def step(self) -> None:
        chance = self.chance
        planned = self.scheduler.schedule()
        assert bool(planned.requests) == self.scheduler.has_work, "there is work, but the step is empty"
        if planned.requests:
            decodes = sum(len(request.token_ids) == 1 for request in planned.requests)
            tokens = sum(len(request.token_ids) for request in planned.requests)
            assert tokens <= max(self.config.max_step_tokens, decodes + 1)
            assert len(planned.requests) <= self.config.max_running
            if chance.random() < self.abort_rate and self.clients:
                self.abort()
            try:
                result = self.runner.execute(planned)
            except RuntimeError:
                outputs = self.scheduler.fail_step("poison")
            else:
                outputs = self.scheduler.update(result)
            for output in outputs:
                self.take(output)
        self.scheduler.check()
        self.step_number += 1
        self.check_deadlines()

    def take(self, output: RequestOutput) -> None:
        client = self.clients[output.serial]  # it ended before, or was aborted, if it is not there
        for token in output.token_ids:
            assert token == next(client.expected), f"{client.name} got a wrong token"
            client.received.append(token)
        assert output.completion_tokens == len(client.received)
        full = client.prompt_length + len(client.received) >= client.longest
        if output.finish_reason == "error":
            self.counts["failed"] += 1
        else:
            ended = "stop" if client.received[-1] in client.ends else "length" if full else None
            assert output.finish_reason == ended, f"{client.name} ended wrongly"
            self.counts["finished"] += ended is not None
        if output.finish_reason is not None:
            del self.clients[output.serial]

    def check_deadlines(self) -> None:
        for client in self.clients.values():
            if client.deadline is None and self.step_number - client.added > STARVED_AFTER:
                client.deadline = self.bound()
            assert client.deadline is None or self.step_number <= client.deadline, f"{client.name} starves"

    def _tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(POISON) for _ in range(count)]


def simulate(seed: int, steps: int) -> tuple[Simulation, int]:
    simulation = Simulation(seed)
    try:
        simulation.run(steps)
    except Exception as error:
        raise AssertionError(f"seed {seed}, step {simulation.step_number}, {simulation.config}: {error!r}") from error
    return simulation, simulation.step_number


def run_seeds(first: int, steps: int) -> dict[str, int]:
    """Runs seeds from ``first`` on until so many steps are done; what happened in them."""
    totals: dict[str, int] = dict.fromkeys(("steps", "retractions"), 0)
    seed = first
    while totals["steps"] < steps:
        simulation, done = simulate(seed, 300)
        totals["steps"] += done
        totals["retractions"] += simulation.scheduler.num_retractions
        for name, count in simulation.counts.items():
            totals[name] = totals.get(name, 0) + count
        seed += 1
    return totals


@pytest.mark.parametrize("part", range(4))
def test_any_traffic_gives_each_request_its_own_tokens_in_time_and_leaks_nothing(part: int) -> None:
    totals = run_seeds(part * 1_000_000, steps=25_000)
    print(totals)
    rare = {name: totals.pop(name) for name in ("failed", "refused")}
    assert min(totals.values()) > 100, f"too little happened: the traffic is too tame: {totals} {rare}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_simulation() -> None:
    print(run_seeds(100_000_000, steps=500_000))


def test_a_seed_replays_exactly() -> None:
    first, second = (simulate(7, 300)[0] for _ in range(2))
    assert first.counts == second.counts
    assert (first.serial, first.step_number) == (second.serial, second.step_number)
    assert first.scheduler.load() == second.scheduler.load()
