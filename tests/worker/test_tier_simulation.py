"""The KV cache's tiers in a deterministic simulation: seeded random traffic over a pool that is far too small for it.

Stores end late, in any order, or fail; requests are aborted and retracted meanwhile. The fake runner's tokens depend on every
page that attention reads, so a page that was copied too early, too late or from the wrong place is a wrong token. The ledgers of
both tiers, pins and locks are checked after every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sapwood_worker.cache.hierarchical import HierarchicalCache
from sapwood_worker.cache.host_pages import HostPages
from sapwood_worker.cache.host_pool import HostPool
from sapwood_worker.model_info import ModelInfo
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.config import SchedulerConfig
from sapwood_worker.scheduler.fake_runner import FakeRunner, continuation
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.scheduler import Scheduler

VOCAB = 60
POISON = 58
NAMESPACES = [b"", b"", b"tenant", b"other"]


class Simulation:
    """One scheduler with tiers under one seed's traffic."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        size = chance.choice([1, 2, 4])
        self.limit = chance.randint(16, 64)
        pages = max(3, int(self.limit * chance.uniform(1, 2.5) / size))
        host_pages = chance.choice([1, pages // 2 + 1, pages * 3, pages * 20])
        self.tiers = HierarchicalCache(
            HostPages(host_pages),
            pages,
            size,
            chance.choice(["write_through", "write_through_selective", "write_back"]),
        )
        config = SchedulerConfig(
            page_size=size,
            num_pages=pages,
            context_length=self.limit,
            max_running=chance.choice([1, 4, 8]),
            max_step_tokens=chance.choice([4, 16, 256]),
            policy=chance.choice(["fcfs", "lpm"]),
            conservativeness=0.0,
        )
        self.scheduler = Scheduler(config, self.tiers)
        self.limit = min(self.limit, pages * size)
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=self.limit,
            vocab_size=VOCAB,
            eos_token_ids=(),
            page_size=size,
            num_pages=pages,
        )
        late = random.Random(seed + 1) if chance.random() < 0.8 else None
        self.runner = FakeRunner(
            info,
            poison=POISON,
            host_pool=HostPool(host_pages, size * 8),
            chance=late,
            copy_failures=chance.choice([0.0, 0.0, 0.3]),
        )
        self.documents = [self.tokens(chance.randint(1, self.limit - 2)) for _ in range(chance.randint(3, 12))]
        self.arrival_rate = chance.choice([0.1, 0.4, 0.7])
        self.expected: dict[int, Iterator[int]] = {}
        self.serial = 0
        self.steps = 0
        self.aborted = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            while self.chance.random() < self.arrival_rate:
                self.add()
            if self.chance.random() < 0.03:
                self.abort()
            if self.chance.random() < 0.005:
                self.scheduler.flush_cache()
            self.step()
        while self.scheduler.has_work or self.scheduler.has_copies:
            self.step()
        assert not self.expected, "a request never ended"
        self.scheduler.check_idle()
        self.tiers.host.clear()
        assert self.tiers.host.num_free == self.tiers.host.num_pages, "a host page leaked"

    def add(self) -> None:
        chance = self.chance
        document = chance.choice(self.documents)
        prompt = (document[: chance.randint(0, len(document))] + self.tokens(chance.randint(1, 4)))[: self.limit - 1]
        if chance.random() < 0.01:
            prompt[0] = POISON
        sampling = SamplingParams(seed=chance.getrandbits(60), max_tokens=chance.choice([1, 3, 12]), ignore_eos=True)
        self.scheduler.add(Request(self.serial, f"r{self.serial}", prompt, sampling, chance.choice(NAMESPACES)))
        self.expected[self.serial] = continuation(prompt, sampling, VOCAB)
        self.serial += 1

    def abort(self) -> None:
        if self.expected:
            serial = self.chance.choice(list(self.expected))
            assert self.scheduler.abort(serial)
            del self.expected[serial]
            self.aborted += 1

    def step(self) -> None:
        planned = self.scheduler.schedule()
        if planned:
            if self.chance.random() < 0.03:
                self.abort()
            try:
                result = self.runner.execute(planned)
            except RuntimeError:
                outputs = self.scheduler.fail_step("poison")
            else:
                outputs = self.scheduler.update(result)
            for output in outputs:
                for token in output.token_ids:
                    assert token == next(self.expected[output.serial]), f"r{output.serial} got a wrong token"
                if output.finish_reason is not None:
                    del self.expected[output.serial]
        self.scheduler.check()
        self.steps += 1

    def tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(POISON) for _ in range(count)]


def run_seeds(first: int, steps: int) -> dict[str, int]:
    names = ("steps", "aborted", "retractions", "host_hits", "stored", "store_failures", "no_room", "fences")
    totals = dict.fromkeys(names, 0)
    seed = first
    while totals["steps"] < steps:
        simulation = Simulation(seed)
        try:
            simulation.run(200)
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {simulation.steps}: {error!r}") from error
        counters = simulation.tiers.counters
        happened = {
            "steps": simulation.steps,
            "aborted": simulation.aborted,
            "retractions": simulation.scheduler.num_retractions,
            "host_hits": counters.host_hits,
            "stored": counters.stored,
            "store_failures": counters.store_failures,
            "no_room": counters.no_room,
            "fences": counters.fences,
        }
        for name, count in happened.items():
            totals[name] += count
        seed += 1
    return totals


@pytest.mark.parametrize("part", range(2))
def test_no_order_of_copies_gives_a_wrong_token_or_leaks_a_page(part: int) -> None:
    totals = run_seeds(part * 1_000_000, steps=4_000)
    print(totals)
    assert min(totals.values()) > 20, f"too little happened: {totals}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_simulation_of_the_tiers() -> None:
    print(run_seeds(100_000_000, steps=200_000))
