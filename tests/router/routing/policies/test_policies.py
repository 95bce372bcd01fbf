"""Each policy's distribution and its worst case."""

import random
import time
from collections import Counter

import pytest
from msgspec.structs import replace

from sapwood_router.routing.factory import PolicyParts, make_policy, policy_names
from sapwood_router.routing.index.blocks import BlockIndex, Tier
from sapwood_router.routing.index.prefixes import HotPrefixes, PrefixIndex
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policies.cache_aware import CacheAware
from sapwood_router.routing.policies.least_load import LeastLoad, LeastTokens
from sapwood_router.routing.policies.power_of_two import PowerOfTwo
from sapwood_router.routing.policies.random import Random
from sapwood_router.routing.policies.round_robin import RoundRobin
from sapwood_router.routing.worker_view import WorkerView

PROMPT = PromptPages(range(100))


def views(*requests: int, **fields) -> list[WorkerView]:
    return [WorkerView(address=f"w{number}", requests=count, **fields) for number, count in enumerate(requests)]


@pytest.mark.parametrize("name", ["cache_aware", "round_robin", "random", "least_load", "least_tokens", "power_of_two"])
def test_every_policy_chooses_among_what_it_is_given(name) -> None:
    policy = make_policy(name, PolicyParts(1 << 20, random.Random(1), time.monotonic, BlockIndex(1 << 20)))
    for count in (1, 2, 5):
        available = views(*range(count))
        for _ in range(50):
            assert policy.choose(available, PROMPT).address in {view.address for view in available}


def test_round_robin_gives_each_its_turn_and_keeps_turning_when_workers_come_and_go() -> None:
    policy = RoundRobin()
    assert [policy.choose(views(0, 9, 0), PROMPT).address for _ in range(6)] == ["w0", "w1", "w2"] * 2
    counts = Counter(policy.choose(views(0, 0), PROMPT).address for _ in range(10))
    assert counts == {"w0": 5, "w1": 5}


def test_random_is_uniform_whatever_the_load() -> None:
    policy = Random(random.Random(3))
    counts = Counter(policy.choose(views(100, 0, 0, 0), PROMPT).address for _ in range(8000))
    assert all(1800 < counts[f"w{number}"] < 2200 for number in range(4))


def test_the_fullest_of_randomly_filled_workers_stays_near_what_chance_allows() -> None:
    policy, loads = Random(random.Random(5)), [0] * 8
    for _ in range(8000):
        loads[int(policy.choose(views(*loads), PROMPT).address[1:])] += 1
    assert max(loads) <= 1000 + 4 * (1000 * 7 / 8) ** 0.5  # four standard deviations of a binomial


def test_round_robin_keeps_numbers_even_however_unequal_the_loads_are() -> None:
    policy = RoundRobin()
    counts = Counter(policy.choose(views(10**6, 0, 5), PROMPT).address for _ in range(301))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_least_load_takes_the_least_requests_and_prompts_and_then_turns() -> None:
    policy = LeastLoad()
    assert policy.choose(views(3, 1, 2), PROMPT).address == "w1"
    one, many = WorkerView("a", requests=1, queued_tokens=9000), WorkerView("b", requests=6)
    assert policy.choose([one, many], PROMPT).address == "b", "a long prompt is more than five answers"
    busy, calm = WorkerView("a", requests=1, queued_tokens=900), WorkerView("b", requests=1, queued_tokens=10)
    assert policy.choose([busy, calm], PROMPT).address == "b"
    given, spared = WorkerView("a", recent_work=10), WorkerView("b", recent_work=5)
    assert policy.choose([given, spared], PROMPT).address == "b"


def test_least_tokens_takes_fewest_tokens_then_fewest_requests_then_turns() -> None:
    policy = LeastTokens()
    long, many = WorkerView("a", requests=1, queued_tokens=9000), WorkerView("b", requests=5, queued_tokens=500)
    choice = policy.choose([long, many], PROMPT)
    assert (choice.address, choice.reason) == ("b", "least_tokens")
    assert policy.choose(views(3, 1, 2), PROMPT).address == "w1"
    given, spared = WorkerView("a", recent_work=10), WorkerView("b", recent_work=5)
    assert policy.choose([given, spared], PROMPT).address == "b"


def test_least_load_never_differs_by_more_than_one_request_under_a_burst() -> None:
    policy, loads = LeastLoad(), [0] * 5
    for _ in range(103):
        loads[int(policy.choose(views(*loads), PROMPT).address[1:])] += 1
    assert max(loads) - min(loads) <= 1


def test_power_of_two_never_takes_the_worst_and_stays_close_to_even_under_a_burst() -> None:
    policy = PowerOfTwo(random.Random(4))
    shares = [WorkerView("full", used_share=0.9), WorkerView("half", used_share=0.5), WorkerView("free")]
    counts = Counter(policy.choose(shares, PROMPT).address for _ in range(3000))
    assert counts["full"] == 0
    assert counts["free"] > counts["half"] > 0
    loads = [0] * 16
    for _ in range(1600):
        loads[int(policy.choose(views(*loads), PROMPT).address[1:])] += 1
    assert max(loads) <= 104
    assert policy.choose(views(7), PROMPT).address == "w0"


def cache_aware() -> CacheAware:
    return CacheAware(PrefixIndex(1 << 24, time.monotonic), BlockIndex(1 << 24), HotPrefixes(time.monotonic))


def test_cache_aware_follows_the_longest_prefix() -> None:
    policy = cache_aware()
    policy.placed("w1", 16, PromptPages(range(64)))
    policy.placed("w2", 16, PromptPages(range(32)))
    choice = policy.choose(views(0, 1, 0), PROMPT)
    assert (choice.address, choice.reason, choice.cached_tokens) == ("w1", "cache_hit", 64)


def test_cache_aware_sees_a_placement_at_once_and_the_answer_when_it_is_over() -> None:
    policy = cache_aware()
    policy.placed("w1", 16, PROMPT)
    assert policy.choose(views(0, 0), PROMPT).cached_tokens == 96
    policy.finished("w1", 16, PROMPT, list(range(100, 161)))
    turn = PromptPages(range(200))
    assert policy.choose(views(0, 0), turn).cached_tokens == 160


def test_of_a_very_long_prompt_the_first_pages_are_noted_and_taken_back() -> None:
    index = PrefixIndex(1 << 30, time.monotonic)
    policy = CacheAware(index, BlockIndex(1 << 20), HotPrefixes(time.monotonic))
    prompt = PromptPages(range(100_000))
    policy.placed("w1", 1, prompt)
    noted = index.entries("w1")
    assert noted == 16_384
    assert policy.choose(views(0, 0, page_size=1), prompt).address == "w1"
    policy.finished("w1", 1, prompt, range(1000))
    assert index.entries("w1") == noted
    policy.failed("w1", 1, prompt)
    policy.placed("w0", 1, prompt)
    policy.failed("w0", 1, prompt)
    assert index.entries("w0") == 0


def test_cache_aware_credits_no_worker_with_a_prompt_that_it_failed() -> None:
    policy = cache_aware()
    other = PromptPages([*range(48), *[7] * 60])  # begins as PROMPT does
    policy.placed("w1", 16, other)
    policy.finished("w1", 16, other, [1, 2])
    for _ in range(2):
        policy.placed("w1", 16, PROMPT)
        policy.failed("w1", 16, PROMPT)
        assert policy.choose(views(0, 0), PROMPT).cached_tokens == 48, "what it held before"
    policy.placed("w0", 16, PROMPT)
    policy.failed("w0", 16, PROMPT)
    choice = policy.choose(views(0, 5), PROMPT)
    assert (choice.address, choice.cached_tokens) == ("w1", 48)
    assert policy.choose(views(0, 0), other).cached_tokens == 96, "another's prompt is left alone"


def test_cache_aware_keeps_what_another_request_placed_there_meanwhile() -> None:
    policy = cache_aware()
    longer = PromptPages(range(160))
    policy.placed("w1", 16, PROMPT)
    policy.placed("w1", 16, longer)
    policy.failed("w1", 16, PROMPT)
    assert policy.choose(views(0, 0), longer).cached_tokens == 160
    policy.failed("w1", 16, longer)
    assert policy.choose(views(0, 0), longer).cached_tokens == 96
    policy.failed("w1", 16, longer)
    assert policy.choose(views(0, 0), longer).cached_tokens == 96, "it had failed once"


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_hears_of_failures(name: str) -> None:
    policy = make_policy(name, PolicyParts(1 << 20, random.Random(1), time.monotonic, BlockIndex(1 << 20)))
    policy.failed("w0", 16, PROMPT)  # nothing was placed
    policy.placed("w0", 16, PROMPT)
    policy.failed("w0", 16, PROMPT)
    policy.reset("w0", 10)
    policy.failed("w0", 16, PROMPT)
    assert policy.choose(views(0, 0), PROMPT).cached_tokens == 0


def test_cache_aware_on_a_miss_takes_the_least_loaded() -> None:
    policy = cache_aware()
    policy.placed("w0", 16, PromptPages(range(1000, 1100)))
    choice = policy.choose(views(2, 3, 1), PROMPT)
    assert (choice.address, choice.reason, choice.cached_tokens) == ("w2", "cache_miss", 0)


def test_cache_aware_spreads_prompts_that_share_nothing_evenly() -> None:
    policy, loads = cache_aware(), [0] * 5
    for number in range(203):  # none of them ends
        prompt = PromptPages(range(1000 * number, 1000 * number + 40))
        address = policy.choose(views(*loads), prompt).address
        policy.placed(address, 16, prompt)
        loads[int(address[1:])] += 1
    assert max(loads) - min(loads) <= 1


def test_cache_aware_spills_when_the_queue_costs_more_than_computing_it_again() -> None:
    policy = cache_aware()
    policy.placed("w0", 16, PROMPT)
    busy, idle = WorkerView("w0", queued_tokens=5000), WorkerView("w1")
    choice = policy.choose([busy, idle], PROMPT)
    assert (choice.address, choice.reason) == ("w1", "cache_spill")
    policy.placed("w1", 16, PROMPT)
    assert policy.choose([busy, idle], PROMPT).reason == "cache_hit"  # a second holder now


def test_cache_aware_spreads_a_hot_prefix_over_all_workers() -> None:
    policy, loads = cache_aware(), [0] * 4
    for number in range(400):  # none of them ends
        prompt = PromptPages([*range(4000), number])
        address = policy.choose(views(*loads), prompt).address
        policy.placed(address, 16, prompt)
        loads[int(address[1:])] += 1
    assert max(loads) <= 1.6 * min(loads) + 8


def test_cache_aware_forgets_a_restarted_worker() -> None:
    policy = cache_aware()
    policy.placed("w0", 16, PROMPT)
    policy.reset("w0", 1000)
    assert policy.choose(views(0, 0), PROMPT).reason == "cache_miss"


def test_a_prompt_shorter_than_a_page_is_a_miss() -> None:
    policy = cache_aware()
    policy.placed("w0", 16, PromptPages(range(5)))
    assert policy.choose(views(1, 0), PromptPages(range(5))).reason == "cache_miss"


class Knowing:
    """cache_aware of three workers that publish their events, and a clock that stands still unless told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.blocks = BlockIndex(1 << 24)
        for worker in ("w0", "w1", "w2"):
            self.blocks.reset(worker)
        self.policy = CacheAware(PrefixIndex(1 << 24, lambda: self.now), self.blocks, HotPrefixes(lambda: self.now))


def test_cache_aware_goes_by_what_workers_say_they_hold_rather_than_by_what_it_sent() -> None:
    knowing = Knowing()
    knowing.policy.placed("w0", 16, PROMPT)
    knowing.now += 60  # no event ever confirmed it: it is gone again
    knowing.blocks.store("w2", Tier.GPU, PROMPT.hashes(16)[:4])
    choice = knowing.policy.choose(views(0, 0, 0), PROMPT)
    assert (choice.address, choice.reason, choice.cached_tokens) == ("w2", "cache_hit", 64)


def test_cache_aware_prefers_the_nearer_tier() -> None:
    knowing = Knowing()
    hashes = PROMPT.hashes(16)
    for worker, tier in (("w0", Tier.REMOTE), ("w1", Tier.GPU), ("w2", Tier.HOST)):
        knowing.blocks.store(worker, tier, hashes)
    assert knowing.policy.choose(views(0, 0, 0), PROMPT).address == "w1"
    assert knowing.policy.choose(views(0, 9, 0), PROMPT).address == "w2"


def test_what_is_in_a_store_counts_for_every_worker_that_shares_it() -> None:
    knowing = Knowing()
    knowing.blocks.store("w0", Tier.REMOTE, PROMPT.hashes(16))
    writer, stranger, sharer = views(9, 0, 0)
    workers = [replace(writer, storage_id="x"), replace(stranger, storage_id="y"), replace(sharer, storage_id="x")]
    choice = knowing.policy.choose(workers, PROMPT)
    assert (choice.address, choice.reason) == ("w2", "cache_hit")
    assert knowing.policy.choose([writer, stranger, sharer], PROMPT).address == "w1", "nobody is known to share it"


def test_siblings_follow_the_first_before_its_event_arrives() -> None:
    knowing = Knowing()
    chosen = set()
    for tail in range(8):
        prompt = PromptPages([*range(96), 1000 + tail])
        choice = knowing.policy.choose(views(0, 0, 0), prompt)
        knowing.policy.placed(choice.address, 16, prompt)
        chosen.add(choice.address)
    assert len(chosen) == 1


def test_a_worker_whose_events_stop_counts_by_what_was_sent_to_it() -> None:
    knowing = Knowing()
    knowing.policy.placed("w1", 16, PROMPT)
    knowing.now += 60
    assert knowing.policy.choose(views(0, 0, 0), PROMPT).reason == "cache_miss"
    knowing.blocks.remove("w1")
    assert knowing.policy.choose(views(0, 0, 0), PROMPT).address == "w1"


@pytest.mark.parametrize("length", [0, 3, 4, 99, 1000])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_long_prompt_is_hashed_in_steps_as_in_one(length: int, page_size: int) -> None:
    tokens = random.Random(length).choices(range(50_000), k=length)
    whole, stepwise = PromptPages(tokens, cache_salt="salt"), PromptPages(tokens, cache_salt="salt")
    steps = sum(1 for _ in stepwise.hash_steps(page_size, 90))
    assert steps == -(-length // (90 // page_size * page_size))
    assert stepwise.hashes(page_size) == whole.hashes(page_size)
