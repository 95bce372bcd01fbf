"""Scheduler, real runner and tiers together: whatever tier a prefix comes from, the tokens are those of recomputation."""

from __future__ import annotations

import functools
import random
import time
from array import array
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.telemetry.metrics import MetricSet
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.storage.file import FileStorage
from sapwood_worker.core.cache.storage.opener import StorageFacts, open_connection
from sapwood_worker.core.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.core.observers import StepClock
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.front.metrics import EngineObserver, WorkerMetrics
from sapwood_worker.ipc.messages import Step as StepMessage

TOKENS = 6


def prompts() -> list[list[int]]:
    """Three documents, each asked about twice, in turns: together far more than the first tier holds."""
    chance = random.Random(5)
    documents = [[chance.randrange(3, 97) for _ in range(70)] for _ in range(3)]
    asked = []
    for _ in range(2):
        asked += [document + [chance.randrange(3, 97) for _ in range(3)] for document in documents for _ in range(2)]
    return asked


def answers(runner: Any, scheduler: Scheduler, batches: list[list[list[int]]]) -> list[list[int]]:
    serial = 0
    received: dict[int, list[int]] = {}
    for batch in batches:
        for prompt in batch:
            sampling = SamplingParams(temperature=0.7, seed=serial, max_tokens=TOKENS, ignore_eos=True)
            scheduler.add(Request(serial, f"r{serial}", array("I", prompt), sampling))
            serial += 1
        while scheduler.has_work or scheduler.has_copies:
            planned = scheduler.schedule()
            if not planned:
                scheduler.wait_for_storage(0.01)
                continue
            for output in scheduler.update(runner.execute(planned)):
                received.setdefault(output.serial, []).extend(output.token_ids)
            scheduler.check()
    return [received[index] for index in range(serial)]


def make_scheduler(runner: Any, page_size: int, num_pages: int, tiers: HierarchicalCache | None) -> Scheduler:
    settings = {"page_size": page_size, "num_pages": num_pages, "max_running": 3, "max_step_tokens": 24}
    return scheduler_for(runner.info, tiers, prefix_cache=tiers is not None, conservativeness=0.0, **settings)


@pytest.fixture(scope="module")
def recomputed(tiny_model: Any, make_runner: Any) -> Callable[[str], list[list[int]]]:
    """A model's answers to :func:`prompts` without any cache."""

    @functools.cache
    def compute(name: str) -> list[list[int]]:
        plain = make_runner(tiny_model(name).path, page_size=16, num_pages=7, max_running=3)
        return answers(plain, make_scheduler(plain, 16, 7, None), [[prompt] for prompt in prompts()])

    return compute


@pytest.mark.parametrize(
    ("name", "policy", "page_size"),
    [
        *product(["llama", "gemma3"], ["write_through", "write_through_selective", "write_back"], [1, 4, 16]),
        ("deepseek-v3", "write_back", 4),
        ("mistral-window", "write_through", 4),
        ("llama4", "write_through", 4),
    ],
)
def test_tokens_from_the_second_tier_equal_recomputation(
    tiny_model: Any, make_runner: Any, recomputed: Any, name: str, policy: Any, page_size: int
) -> None:
    path = tiny_model(name).path
    num_pages = 112 // page_size
    batches = [[prompt] for prompt in prompts()]
    runner = make_runner(path, page_size=page_size, num_pages=num_pages, max_running=3, host_cache_ratio=4.0)
    tiers = HierarchicalCache(HostPages(runner.host_pool.num_pages), num_pages, page_size, policy)
    scheduler = make_scheduler(runner, page_size, num_pages, tiers)
    assert answers(runner, scheduler, batches) == recomputed(name)
    assert tiers.counters.host_hits >= 3 * (64 // page_size), "the second tier was hardly used"


def storage_tiers(runner: Any, page_size: int, folder: Path, policy: Any = "write_through") -> HierarchicalCache:
    """Tiers with a store of files, whose pages are always worth fetching and always waited for."""
    host = HostPages(runner.host_pool.num_pages)
    options = PrefetchOptions(policy="wait_complete", share=1.0)
    storage = StorageTier(host, runner.host_pool, page_size, options, time.monotonic)
    facts = StorageFacts(runner.host_pool, page_size, runner.cache_identity, 1.0, min_tokens=1)
    storage.attach(open_connection(FileStorage(folder, 1 << 30), facts, time.monotonic))
    return HierarchicalCache(host, runner.info.num_pages, page_size, policy, storage)


@pytest.mark.parametrize(
    ("name", "policy", "page_size"),
    [*product(["llama", "gemma3"], ["write_through", "write_back"], [1, 16]), ("deepseek-v3", "write_through", 16)],
)
def test_a_worker_that_starts_cold_takes_its_prefixes_from_the_store(
    tiny_model: Any, make_runner: Any, recomputed: Any, tmp_path: Path, name: str, policy: Any, page_size: int
) -> None:
    path = tiny_model(name).path
    num_pages = 112 // page_size
    batches = [[prompt] for prompt in prompts()]
    for life in range(2):
        runner = make_runner(path, page_size=page_size, num_pages=num_pages, max_running=3, host_cache_ratio=2.0)
        tiers = storage_tiers(runner, page_size, tmp_path, policy)
        scheduler = make_scheduler(runner, page_size, num_pages, tiers)
        assert answers(runner, scheduler, batches) == recomputed(name)
        if policy == "write_back":
            scheduler.clear_device()
            answers(runner, scheduler, [])
        settle(scheduler, runner)
        assert tiers.storage is not None
        counters = tiers.storage.counters
        assert (counters.rejected, counters.timeouts) == (0, 0)
        if life == 1:
            assert counters.fetched >= 3 * (64 // page_size), "the second life computed it all again"


def settle(scheduler: Scheduler, runner: Any) -> None:
    """Waits until all that is to be copied or stored is."""
    while scheduler.has_copies:
        planned = scheduler.schedule()
        if planned:
            scheduler.update(runner.execute(planned))
        scheduler.wait_for_storage(0.01)


def test_corrupt_objects_are_computed_again_and_replaced(tiny_model: Any, make_runner: Any, tmp_path: Path) -> None:
    path = tiny_model("llama").path
    batches = [[prompts()[0]]]
    results = []
    for life in range(3):
        runner = make_runner(path, page_size=16, num_pages=16, max_running=3, host_cache_ratio=2.0)
        tiers = storage_tiers(runner, 16, tmp_path)
        scheduler = make_scheduler(runner, 16, 16, tiers)
        results.append(answers(runner, scheduler, batches))
        settle(scheduler, runner)
        assert tiers.storage is not None
        assert tiers.storage.counters.rejected == (2 if life == 1 else 0)
        assert tiers.storage.counters.fetched == (0, 2, 4)[life]
        if life == 0:
            objects = sorted((tmp_path / "objects").glob("*/*/*"), key=lambda each: each.stat().st_mtime_ns)
            pages = [each for each in objects if not each.name.startswith("0" * 20)]
            assert len(pages) == 4
            content = bytearray(pages[0].read_bytes())
            content[-1] ^= 1
            pages[0].write_bytes(content)
            pages[1].write_bytes(pages[2].read_bytes())
    assert results[0] == results[1] == results[2]


def test_tenants_with_the_same_prompt_share_nothing_in_any_tier(
    tiny_model: Any, make_runner: Any, tmp_path: Path
) -> None:
    def ask(tenant: bytes) -> int:
        sampling = SamplingParams(max_tokens=1, seed=1)
        scheduler.add(Request(0, "r", prompts()[0], sampling, tenant))
        found = 0
        while scheduler.has_work:
            planned = scheduler.schedule()
            if planned:
                found += sum(output.cached_tokens for output in scheduler.update(runner.execute(planned)))
        settle(scheduler, runner)
        return found

    def cold() -> tuple[Any, HierarchicalCache, Scheduler]:
        runner = make_runner(tiny_model("llama").path, page_size=16, num_pages=32, max_running=3, host_cache_ratio=2.0)
        tiers = storage_tiers(runner, 16, tmp_path)
        return runner, tiers, make_scheduler(runner, 16, 32, tiers)

    runner, tiers, scheduler = cold()
    assert (ask(b"a"), ask(b"b")) == (0, 0)
    assert tiers.counters.device_hits == 0, "a hit in L1"
    assert ask(b"a") == 72 and tiers.counters.device_hits == 4, "L1 was not used at all"
    scheduler.clear_device()
    assert ask(b"c") == 0 and tiers.counters.host_hits == 0, "a hit in L2"
    assert ask(b"a") == 64 and tiers.counters.host_hits == 4, "L2 was not used at all"
    runner, tiers, scheduler = cold()
    assert tiers.storage is not None
    assert ask(b"d") == 0 and tiers.storage.counters.fetched == 0, "a hit in L3"
    assert ask(b"a") == 64 and tiers.storage.counters.fetched == 4, "L3 was not used at all"
    assert tiers.storage.counters.rejected == 0


def test_another_models_objects_are_not_even_looked_at(tiny_model: Any, make_runner: Any, tmp_path: Path) -> None:
    identities = set()
    for name, page_size in (("llama", 16), ("llama-llama3-rope", 16), ("llama", 8)):
        runner = make_runner(
            tiny_model(name).path, page_size=page_size, num_pages=32, max_running=3, host_cache_ratio=2
        )
        tiers = storage_tiers(runner, page_size, tmp_path)
        scheduler = make_scheduler(runner, page_size, 32, tiers)
        answers(runner, scheduler, [[prompts()[0]]])
        settle(scheduler, runner)
        assert tiers.storage is not None and tiers.storage.connection is not None
        assert tiers.storage.counters.fetched == 0
        identities.add(tiers.storage.connection.namespace)
    assert len(identities) == 3


def test_the_hit_counts_are_what_each_request_found(tiny_model: Any, make_runner: Any) -> None:
    runner = make_runner(tiny_model("llama").path, page_size=16, num_pages=8, max_running=3, host_cache_ratio=4.0)
    tiers = HierarchicalCache(HostPages(runner.host_pool.num_pages), 8, 16)
    scheduler = make_scheduler(runner, 16, 8, tiers)
    first, other = list(range(3, 73)), list(range(20, 90))
    cached = []
    for serial, prompt in enumerate([first, first, other, other, first]):
        scheduler.add(Request(serial, f"r{serial}", prompt, SamplingParams(max_tokens=1, seed=1)))
        while scheduler.has_work:
            cached += [output.cached_tokens for output in scheduler.update(runner.execute(scheduler.schedule()))]
    # Eight pages hold one prompt of four and a half pages, not two: the last request's first pages come back from the host.
    assert cached == [0, 69, 0, 69, 64]
    assert tiers.counters.host_hits > 0
    assert tiers.counters.device_hits + tiers.counters.host_hits == 12


class RecordedSpan:
    """Keeps itself in its tracing's list once it has ended."""

    traceparent = "00-" + "5b" * 16 + "-" + "c7" * 8 + "-01"

    def __init__(self, ended: list[tuple[str, dict[str, Any], int, int]], name: str, facts: Any, begun: int) -> None:
        self._ended, self._name, self._facts, self._begun = ended, name, dict(facts or {}), begun

    def set(self, name: str, value: Any) -> None:
        self._facts[name] = value

    def end(self, *, error: str | None = None, at_ns: int | None = None) -> None:
        self._ended.append((self._name, self._facts, self._begun, at_ns or time.time_ns()))


class RecordedTracing:
    on = True

    def __init__(self) -> None:
        self.ended: list[tuple[str, dict[str, Any], int, int]] = []

    def start(
        self, name: str, *, parent: Any, kind: Any = "internal", attributes: Any = None, at_ns: Any = None
    ) -> Any:
        return RecordedSpan(self.ended, name, attributes, at_ns or time.time_ns())

    def close(self) -> None:
        pass


def test_a_request_s_trace_shows_what_was_loaded_from_lower_tiers(
    tiny_model: Any, make_runner: Any, tmp_path: Path
) -> None:
    prompt = list(range(3, 73))
    for life in range(2):
        runner = make_runner(tiny_model("llama").path, page_size=16, num_pages=8, max_running=3, host_cache_ratio=4.0)
        scheduler = make_scheduler(runner, 16, 8, storage_tiers(runner, 16, tmp_path))
        tracing, clock = RecordedTracing(), StepClock()
        observer = EngineObserver(WorkerMetrics(MetricSet()), tracing)
        observer.submitted(1, "r1", RecordedSpan.traceparent)
        request = Request(1, "r1", array("I", prompt), SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
        scheduler.add(request)
        clock.submitted(request)
        while scheduler.has_work:
            planned = scheduler.schedule()
            if planned:
                clock.planned(planned)
                result = runner.execute(planned)
                outputs = scheduler.update(result)
                clock.done(result)
                message = StepMessage(outputs, scheduler.load())
                clock.report(message, idle=False)
                clock.sent()
                observer.steps(message.times)
                observer.outputs(outputs)
        observer.closed(1, active=False)
        settle(scheduler, runner)
        spans = {
            (name, facts.get("sapwood.cache.tier")): (facts, begun, end) for name, facts, begun, end in tracing.ended
        }
        assert {("queue", None), ("prefill", None), ("decode", None)} <= spans.keys()
        loads = {tier: spans[name, tier] for name, tier in spans if name == "cache load"}
        assert loads.keys() == ({"storage", "host"} if life else set())
        for facts, begun, end in loads.values():
            assert facts["sapwood.cache.pages"] == 4
            assert begun <= end
        if life:  # first from the store, while it queued, then to the device
            assert loads["storage"][2] <= loads["host"][1]
