"""The KV cache's tiers in a deterministic simulation: seeded random traffic over a pool that is far too small for it.

Copies to the host end late, in any order, or fail; the store answers late, loses, cuts and mixes up what it was given,
or is down; it is detached and attached again. Requests are aborted and retracted meanwhile. The fake runner's tokens
depend on every page that attention reads, so a page that was copied too early, too late or from the wrong place is a
wrong token. The ledgers of both tiers, pins and locks are checked after every step.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.drafts.scripted_drafter import ScriptedDrafter
from sapwood_testing.worker.fake_runner import FakeRunner, continuation, random_windows
from sapwood_testing.worker.storage.fake_storage import FakeExecutor, FakeStorage
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.storage.connection import Connection
from sapwood_worker.core.cache.storage.record import namespace_of
from sapwood_worker.core.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.front.kv_event_stream import KvEventStream
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.kv_events import AllBlocksCleared, BlockStored, split_hashes
from sapwood_worker.records.model_info import ModelInfo

VOCAB = 60
POISON = 58
MOVES = ("stores", "fetches", "puts")
RARE = ("rejected", "missing")
NAMESPACES = [b"", b"", b"tenant", b"other"]


class Simulation:
    """One scheduler with tiers under one seed's traffic."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        size = chance.choice([1, 2, 4])
        self.limit = chance.randint(16, 64)
        pages = max(3, int(self.limit * chance.uniform(1, 2.5) / size))
        host_pages = chance.choice([1, pages, pages * 2, pages * 4, pages * 20])
        windows = random_windows(random.Random(seed), size, pages) if seed % 3 == 1 else ()
        pool, host = HostPool(host_pages, size * 8 * (1 + len(windows))), HostPages(host_pages)
        self.time = 0.0
        options = PrefetchOptions(
            policy=chance.choice(["best_effort", "wait_complete", "timeout"]),
            timeout=5,
            share=chance.choice([0.3, 0.9]),
        )
        self.storage = StorageTier(host, pool, size, options, lambda: self.time)
        self.objects: dict[str, bytes] = {}
        self.fault_rate = chance.choice([0.0, 0.05, 0.2])
        self.namespace = namespace_of("model", size)
        self.attach()
        policy = chance.choice(["write_through", "write_through_selective", "write_back"])
        self.tiers = HierarchicalCache(host, pages, size, policy, self.storage)
        config = SchedulerConfig(
            page_size=size,
            num_pages=pages,
            context_length=self.limit,
            max_running=chance.choice([1, 4, 8]),
            max_step_tokens=chance.choice([4, 16, 256]),
            policy=chance.choice(["fcfs", "lpm"]),
            conservativeness=0.0,
            kv_events=True,
            windows=windows,
            speculate="prefix" if seed % 2 else "off",
        )
        self.events = KvEventStream()
        drafter = ScriptedDrafter(
            lambda request: continuation(request.token_ids[: request.prompt_length], request.sampling, VOCAB),
            random.Random(seed),
            right=0.8,
            vocab_size=VOCAB,
        )
        self.scheduler = Scheduler(config, self.tiers, drafter=drafter)
        self.limit = min(self.limit, pages * size)
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=self.limit,
            vocab_size=VOCAB,
            eos_token_ids=(),
            page_size=size,
            num_pages=pages,
            windows=windows,
        )
        late = random.Random(seed + 1) if chance.random() < 0.8 else None
        self.runner = FakeRunner(
            info,
            poison=POISON,
            host_pool=pool,
            chance=late,
            copy_failures=chance.choice([0.0, 0.0, 0.3]),
        )
        self.documents = [self.tokens(chance.randint(1, self.limit - 2)) for _ in range(chance.randint(2, 5))]
        self.arrival_rate = chance.choice([0.1, 0.4, 0.7])
        self.expected: dict[int, Iterator[int]] = {}
        self.serial = 0
        self.steps = 0
        self.aborted = 0
        self.told_stored = 0
        self.flushed_amid = 0
        self.aborted_amid: Counter[str] = Counter()
        self.retracted_amid: Counter[str] = Counter()

    def attach(self) -> None:
        self.store = FakeStorage(self.objects, self.chance, self.fault_rate)
        executor = FakeExecutor(self.chance)
        self.storage.attach(Connection(self.store, executor, self.namespace, 1, lambda: self.time))

    def trouble(self) -> None:
        """What happens to stores now and then."""
        chance = self.chance
        if chance.random() < (0.2 if self.store.down else 0.01):
            self.store.down = not self.store.down
        if chance.random() < 0.02 and self.objects:  # somebody else made room
            del self.objects[chance.choice(sorted(self.objects))]
        if chance.random() < 0.01:
            self.storage.detach()
            if chance.random() < 0.7:
                self.attach()
        if chance.random() < 0.1:  # what comes now comes from the store
            self.scheduler.flush_cache()
            assert not any(self.tiers.host.find(entry.key) for entry in self.tiers.host.entries())
            self.flushed_amid += "stores" in self.under_way()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            while self.chance.random() < self.arrival_rate:
                self.add()
            if self.chance.random() < 0.03:
                self.abort()
            if self.chance.random() < 0.005:
                self.scheduler.clear_device()
            self.trouble()
            self.step()
        for _ in range(10_000):
            if not self.scheduler.has_work and not self.scheduler.has_copies:
                break
            self.step()
        self.storage.detach()
        while self.storage.busy:
            self.storage.poll()
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
            self.aborted_amid.update(self.under_way())

    def under_way(self) -> list[str]:
        """What is being moved between tiers just now."""
        unready = sum(not entry.ready for entry in self.tiers.host.entries())
        moves = {
            "stores": unready > self.storage.arrivals.reading,
            "fetches": self.storage.arrivals.reading > 0,
            "puts": self.storage.writing > 0,
        }
        return [name for name, moves_now in moves.items() if moves_now]

    def step(self) -> None:
        self.time += self.chance.uniform(0, 2)
        amid, retractions = self.under_way(), self.scheduler.num_retractions
        planned = self.scheduler.schedule()
        if self.scheduler.num_retractions > retractions:
            self.retracted_amid.update(amid)
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
        self.check_events()
        self.steps += 1

    def check_events(self) -> None:
        """Anybody who has followed the events knows what the second tier has and what the third is known to have, and that each
        block of these followed its parent."""
        events = self.scheduler.take_kv_events()
        assert AllBlocksCleared() not in events, "there are tiers that keep what they have"
        self.events.apply(events)
        told: dict[str, set[bytes]] = {"CPU_TIER1": set(), "CPU_TIER2": set()}
        for batch in self.events.snapshot():
            for event in batch.events:
                if isinstance(event, BlockStored) and event.medium in told:
                    assert not event.parent or event.medium == "CPU_TIER1" or event.parent in told[event.medium]
                    told[event.medium].update(split_hashes(event.hashes))
        assert told["CPU_TIER1"] == {entry.key.hash for entry in self.tiers.host.entries() if entry.ready}
        known = self.storage.known
        assert len(told["CPU_TIER2"]) == len(known) and all(each in known for each in told["CPU_TIER2"])
        self.told_stored = max(self.told_stored, len(known))
        if self.storage.connection is None:
            assert not len(known)

    def tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(POISON) for _ in range(count)]


def run_seeds(first: int, steps: int) -> dict[str, int]:
    totals: dict[str, int] = {}
    seed = first
    while totals.get("steps", 0) < steps:
        simulation = Simulation(seed)
        try:
            simulation.run(80)
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {simulation.steps}: {error!r}") from error
        counters = dataclasses.asdict(simulation.tiers.counters)
        storage = dataclasses.asdict(simulation.storage.counters)
        happened = {
            "steps": simulation.steps,
            "aborted": simulation.aborted,
            "told_stored": simulation.told_stored,
            "flushed amid stores": simulation.flushed_amid,
            **{f"aborted amid {what}": simulation.aborted_amid[what] for what in MOVES},
            **{f"retracted amid {what}": simulation.retracted_amid[what] for what in MOVES},
            "retractions": simulation.scheduler.num_retractions,
            "accepted": simulation.scheduler.load().accepted_tokens,
            **{name: count for name, count in (counters | storage).items() if "seconds" not in name},
        }
        for name, count in happened.items():
            totals[name] = totals.get(name, 0) + count
        seed += 1
    return totals


def test_no_order_of_copies_gives_a_wrong_token_or_leaks_a_page() -> None:
    totals = run_seeds(0, steps=7_000)
    print(totals)
    often = {name: count for name, count in totals.items() if " amid " not in name and name not in RARE}
    assert min(often.values()) > 20, f"too little happened: {totals}"
    rare = (*RARE, "flushed amid stores", *(f"aborted amid {what}" for what in MOVES))
    assert all(totals[name] for name in rare), f"too little: {totals}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_long_simulation_of_the_tiers() -> None:
    totals = run_seeds(100_000_000, steps=60_000)
    print(totals)
    assert all(totals.values()), f"something never happened: {totals}"
