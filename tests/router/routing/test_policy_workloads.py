"""cache_aware on simulated multi-turn traffic: time is simulated, workers keep true LRU caches and prefill one at a time.

The turns are as long as in ``benchmarks/router_load/hits.py``, which measures the same workloads with real processes.
"""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest

from sapwood_common.contract.page_hash import hash_pages
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.index.prefixes import HotPrefixes, PrefixIndex
from sapwood_router.routing.policies.base import Choice, Forgetful, Policy, PromptPages
from sapwood_router.routing.policies.cache_aware import CacheAware
from sapwood_router.routing.policies.least_load import LeastLoad

PAGE = 16
SYSTEM, USER, ANSWER = 500, 50, 6
SECONDS_A_PAGE, SECONDS_A_PROMPT, SECONDS_OF_DECODE = 0.0005, 0.002, 0.07


class Sticky(Forgetful):
    """The yardstick: each conversation, known by what it begins with, has its own worker for ever."""

    def __init__(self) -> None:
        self._turn = itertools.count()
        self._owner: dict[tuple[int, ...], int] = {}

    def choose(self, workers, prompt) -> Choice:
        key = tuple(prompt.token_ids[SYSTEM : SYSTEM + USER])
        owner = self._owner.setdefault(key, next(self._turn) % len(workers))
        return Choice(workers[owner].address, "sticky")


@dataclass
class Result:
    hit_rate: float
    imbalance: float
    waits: list[float]

    @property
    def p99_wait(self) -> float:
        return sorted(self.waits)[int(len(self.waits) * 0.99)]


class Simulation:
    def __init__(self, policy: Policy, workers: int, pages: int) -> None:
        self.now = 0.0
        self.policy = policy
        self.pages = pages
        self.workers: list[Worker] = []
        self.caches: list[OrderedDict[bytes, None]] = []
        self.busy_until: list[float] = []
        self.requests: list[int] = []
        self.hits = self.asked = 0
        self.waits: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for _ in range(workers):
            self.join()

    def join(self) -> None:
        worker = Worker(f"w{len(self.workers)}", CircuitBreaker(BreakerSettings(), self._clock), self._clock)
        worker.model = ServedModel("m", 10**6, 10**6, PAGE, self.pages, epoch=1)
        self.policy.reset(worker.address, self.pages)
        self.workers.append(worker)
        self.caches.append(OrderedDict())
        self.busy_until.append(0.0)
        self.requests.append(0)

    def _clock(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def request(self, tokens: list[int], answer: list[int], done: Callable[[], None]) -> None:
        prompt = PromptPages(tokens)
        choice = self.policy.choose([worker.view() for worker in self.workers], prompt)
        number = int(choice.address[1:])
        self.policy.placed(choice.address, PAGE, prompt)
        lease = self.workers[number].lease(max(1, len(tokens) - choice.cached_tokens))
        self.requests[number] += 1
        pages = prompt.hashes(PAGE)
        held = next((i for i, page in enumerate(pages) if page not in self.caches[number]), len(pages))
        self.hits += held
        self.asked += len(pages)
        self._remember(number, tokens + answer[:-1])
        start = max(self.now, self.busy_until[number])
        self.waits.append(start - self.now)
        prefilled = start + SECONDS_A_PROMPT + SECONDS_A_PAGE * (len(pages) - held)
        self.busy_until[number] = prefilled
        self.at(prefilled, lease.prefilled)

        def finish() -> None:
            lease.release()
            self.policy.finished(choice.address, PAGE, prompt, answer)
            done()

        self.at(prefilled + SECONDS_OF_DECODE, finish)

    def run(self) -> Result:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        assert all(worker.in_flight == 0 and worker.pending_tokens == 0 for worker in self.workers)
        mean = sum(self.requests) / len(self.requests)
        return Result(self.hits / self.asked, max(self.requests) / mean, self.waits)

    def _remember(self, number: int, tokens: list[int]) -> None:
        cache = self.caches[number]
        for page in reversed(hash_pages(tokens, PAGE)):
            cache[page] = None
            cache.move_to_end(page)
        while len(cache) > self.pages:
            cache.popitem(last=False)


def conversations(
    policy: Policy,
    *,
    count: int,
    cache_share: float,
    concurrency: int,
    seed: int,
    turns: int = 8,
    systems: int = 4,
    system: int = SYSTEM,
    answer: int = ANSWER,
    workers: int = 4,
    joins_at: float | None = None,
) -> Result:
    rng = random.Random(seed)

    def some(length: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(length)]

    shared = [some(system) for _ in range(systems)]
    zipf = [1 / (rank + 1) for rank in range(systems)]
    talks = [list(prompt) for prompt in (shared if systems == count else rng.choices(shared, zipf, k=count))]
    left = dict.fromkeys(range(count), turns)
    total_pages = (count * turns * (USER + answer) + systems * system) // PAGE
    simulation = Simulation(policy, workers, int(total_pages * cache_share))
    waiting = set(range(count))

    def next_turn() -> None:
        if not waiting:
            return
        number = rng.choice(sorted(waiting))
        waiting.discard(number)
        left[number] -= 1
        talks[number] += some(USER)
        said = some(answer)

        def done() -> None:
            talks[number].extend(said)
            if left[number]:
                waiting.add(number)
            next_turn()

        simulation.request(list(talks[number]), said, done)

    for _ in range(concurrency):
        next_turn()
    if joins_at is not None:
        simulation.at(joins_at, simulation.join)
    return simulation.run()


def new_cache_aware() -> CacheAware:
    seconds = itertools.count()

    def clock() -> float:
        return float(next(seconds))

    return CacheAware(PrefixIndex(1 << 26, clock), BlockIndex(0), HotPrefixes(clock))


EASY = {"count": 64, "cache_share": 0.30}
TIGHT = {"count": 256, "cache_share": 0.08}


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_with_ample_cache_conversations_stick_and_load_stays_even(concurrency) -> None:
    ours = conversations(new_cache_aware(), **EASY, concurrency=concurrency, seed=1)
    sticky = conversations(Sticky(), **EASY, concurrency=concurrency, seed=1)
    blind = conversations(LeastLoad(), **EASY, concurrency=concurrency, seed=1)
    assert ours.hit_rate >= sticky.hit_rate
    assert ours.hit_rate > blind.hit_rate + 0.1
    assert ours.imbalance <= 1.25


@pytest.mark.parametrize(("workload", "hits", "imbalance"), [(EASY, 0.92, 1.25), (TIGHT, 0.82, 1.15)])
def test_the_goals_hold_over_five_seeds(workload, hits, imbalance) -> None:
    ours = [conversations(new_cache_aware(), **workload, concurrency=8, seed=seed) for seed in range(1, 6)]
    sticky = [conversations(Sticky(), **workload, concurrency=8, seed=seed) for seed in range(1, 6)]
    assert mean(each.hit_rate for each in ours) >= hits
    assert all(each.imbalance <= imbalance for each in ours)
    # A fixed worker for each conversation needs a key that names it, and has every worker hold every system prompt.
    assert mean(each.hit_rate for each in ours) > mean(each.hit_rate for each in sticky)


@pytest.mark.parametrize("system", [0, 500])
def test_a_single_conversation_never_changes_its_worker(system) -> None:
    result = conversations(
        new_cache_aware(), count=1, cache_share=8.0, concurrency=1, seed=3, turns=40, system=system, answer=100
    )
    assert result.imbalance == 4


@pytest.mark.parametrize(
    "workload",
    [
        {"count": 200, "cache_share": 0.3, "systems": 1},  # one hot prefix
        {"count": 800, "cache_share": 0.3, "systems": 800, "turns": 1},  # nothing shared at all
        {"count": 200, "cache_share": 0.3, "workers": 3, "joins_at": 0.5},  # an empty worker joins
    ],
)
def test_skewed_workloads_do_not_collapse(workload) -> None:
    ours = conversations(new_cache_aware(), **workload, concurrency=24, seed=4)
    blind = conversations(LeastLoad(), **workload, concurrency=24, seed=4)
    assert ours.p99_wait <= 1.5 * blind.p99_wait
    assert ours.hit_rate >= blind.hit_rate
