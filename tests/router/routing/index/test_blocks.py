"""The exact index against a plain model: sets of hashes for each worker and tier."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sapwood_router.routing.index.blocks import ENTRY_BYTES, HOLDING_BYTES, TIER_WEIGHTS, BlockIndex, Tier

WORKERS = ("a", "b", "c")
HASHES = [bytes([i]) * 16 for i in range(12)]


def plain_overlap(
    model: dict[str, list[set[bytes]]], worker: str, prompt: list[bytes], stores: dict[str, str]
) -> tuple[int, float]:
    pages, weight = 0, 0.0
    peers = [other for other in model if other in stores and stores[other] == stores.get(worker)]
    for page in prompt:
        tiers = [tier for tier in Tier if page in model[worker][tier]]
        if any(page in model[peer][Tier.REMOTE] for peer in peers):
            tiers.append(Tier.REMOTE)
        if not tiers:
            break
        pages += 1
        weight += max(TIER_WEIGHTS[tier] for tier in tiers)
    return pages, weight


class IndexAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(1 << 20)
        self.model: dict[str, list[set[bytes]]] = {}

    @rule(worker=st.sampled_from(WORKERS), tier=st.sampled_from(Tier), pages=st.lists(st.sampled_from(HASHES)))
    def reset(self, worker: str, tier: Tier, pages: list[bytes]) -> None:
        self.index.reset(worker, [(tier, pages)])
        self.model[worker] = [set(pages) if each is tier else set() for each in Tier]

    @rule(worker=st.sampled_from(WORKERS), tier=st.sampled_from(Tier), pages=st.lists(st.sampled_from(HASHES)))
    def store(self, worker: str, tier: Tier, pages: list[bytes]) -> None:
        if worker in self.model:
            self.index.store(worker, tier, pages)
            self.model[worker][tier].update(pages)

    @rule(worker=st.sampled_from(WORKERS), tier=st.sampled_from(Tier), pages=st.lists(st.sampled_from(HASHES)))
    def drop(self, worker: str, tier: Tier, pages: list[bytes]) -> None:
        if worker in self.model:
            self.index.drop(worker, tier, pages)
            self.model[worker][tier].difference_update(pages)

    @rule(worker=st.sampled_from(WORKERS))
    def remove(self, worker: str) -> None:
        self.index.remove(worker)
        self.model.pop(worker, None)

    @rule(
        prompt=st.lists(st.sampled_from(HASHES), unique=True),
        stores=st.dictionaries(st.sampled_from(WORKERS), st.sampled_from(["x", "y"])),
    )
    def overlaps_are_those_of_the_model(self, prompt: list[bytes], stores: dict[str, str]) -> None:
        found = self.index.overlaps(prompt, stores)
        tiered = any(held[Tier.HOST] or held[Tier.REMOTE] for held in self.model.values())
        for worker, (held, *_) in self.model.items():
            pages, weight = plain_overlap(self.model, worker, prompt, stores)
            if tiered or not held.intersection(prompt[pages:]):
                assert found.get(worker, (0, 0.0)) == (pages, pytest.approx(weight))
            elif worker in found:  # pages after a gap, which no cache has, may let those before count
                assert found[worker][0] >= pages
                assert prompt[found[worker][0] - 1] in held
            else:
                assert pages == 0
        assert set(found) <= set(self.model)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for worker in WORKERS:
            assert self.index.knows(worker) == (worker in self.model)
            for tier in Tier:
                assert self.index.pages(worker, tier) == self.model.get(worker, [set()] * 3)[tier]
        holdings = sum(len(tier) for tiers in self.model.values() for tier in tiers)
        entries = sum(len(set().union(*(tiers[tier] for tiers in self.model.values()))) for tier in Tier)
        assert self.index.bytes_used == holdings * HOLDING_BYTES + entries * ENTRY_BYTES


TestIndexAgainstModel = IndexAgainstModel.TestCase


FORK = HASHES[:4]
BRANCHES = (FORK + HASHES[4:8], FORK + HASHES[8:])


@given(
    st.fixed_dictionaries({worker: st.tuples(st.integers(0, 8), st.integers(0, 8)) for worker in WORKERS}),
    st.sampled_from(BRANCHES),
    st.integers(0, 8),
    st.one_of(st.none(), st.lists(st.sampled_from([*WORKERS, "unknown"]))),
)
def test_pages_of_one_tier_are_counted_up_to_where_each_worker_leaves_the_prompt(lengths, branch, asked, among):
    index, prompt, wanted = BlockIndex(1 << 20), branch[:asked], {}
    for worker, counts in lengths.items():
        held = {page for chain, count in zip(BRANCHES, counts, strict=True) for page in chain[:count]}
        index.reset(worker, [(Tier.GPU, sorted(held))])
        count = next((i for i, page in enumerate(prompt) if page not in held), len(prompt))
        if count and (among is None or worker in among):
            wanted[worker] = (count, float(count))
    assert index.overlaps(prompt, among=among) == wanted


def test_a_page_refused_for_room_counts_where_the_following_pages_are_known():
    index = BlockIndex(8 * (ENTRY_BYTES + HOLDING_BYTES))
    index.reset("a", [(Tier.GPU, HASHES[:2] + HASHES[3:9])])
    index.store("a", Tier.GPU, HASHES[2:3])
    assert index.refused == 1
    assert index.overlaps(HASHES[:9]) == {"a": (9, 9.0)}


@given(st.lists(st.integers(0, 10_000), max_size=400), st.integers(1, 20_000))
def test_the_budget_holds_whatever_is_stored(pages: list[int], budget: int):
    index = BlockIndex(budget)
    index.reset("a")
    hashes = [page.to_bytes(16, "big") for page in pages]
    index.store("a", Tier.GPU, hashes)
    assert index.bytes_used <= budget
    kept = index.pages("a", Tier.GPU)
    assert kept <= set(hashes)
    assert bool(index.refused) == (kept != set(hashes))


def test_a_page_that_goes_makes_room_for_another():
    index = BlockIndex(ENTRY_BYTES + HOLDING_BYTES)
    index.reset("a", [(Tier.GPU, HASHES[:2])])
    assert index.refused == 1
    index.drop("a", Tier.GPU, HASHES[:1])
    index.store("a", Tier.GPU, HASHES[1:2])
    assert index.overlaps(HASHES[1:2]) == {"a": (1, 1.0)}


def test_the_estimate_of_memory_is_no_less_than_what_python_takes():
    import tracemalloc

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = BlockIndex(1 << 30)
        for worker in WORKERS:
            index.reset(worker)
            index.store(worker, Tier.GPU, (i.to_bytes(16, "big") for i in range(60_000)))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= index.bytes_used * 1.1


@pytest.mark.slow
def test_memory_is_flat_over_a_million_distinct_prompts():
    budget, held = 4_000_000, 2500
    index = BlockIndex(budget)
    index.reset("w")
    resident = []
    for number in range(1_000_000):
        pages = [(4 * number + page).to_bytes(16) for page in range(4)]
        index.store("w", Tier.GPU, pages)
        if number >= held:  # the worker's cache is full: for what comes, something goes
            index.drop("w", Tier.GPU, [(4 * (number - held) + page).to_bytes(16) for page in range(4)])
        if number % 100_000 == 99_999:
            assert index.bytes_used <= budget
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert index.refused == 0
    assert max(resident[1:]) - resident[1] < 2_000_000


def test_only_the_workers_asked_about_are_counted():
    index = BlockIndex(1 << 20)
    for worker in WORKERS:
        index.reset(worker, [(Tier.GPU, HASHES[:4])])
    assert index.overlaps(HASHES, among=["b", "unknown"]) == {"b": (4, 4.0)}
    assert index.overlaps(HASHES, among=[]) == {}


def test_holders_come_longest_prefix_first_with_a_few_of_equal_length():
    index, rng = BlockIndex(1 << 24), random.Random(1)
    for number in range(200):
        index.reset(f"w{number}", [(Tier.GPU, HASHES[:3])])
    index.store("w5", Tier.HOST, HASHES[3:9])
    index.store("w6", Tier.GPU, HASHES[3:7])
    drawn = set()
    for _ in range(50):
        named = list(index.holders(HASHES, 5, rng).items())
        assert named[:2] == [("w5", 9), ("w6", 7)]
        assert len(named) == 5 and {pages for _, pages in named[2:]} == {3}
        drawn.update(worker for worker, _ in named[2:])
    assert len(drawn) > 50  # not always the same of those that hold alike
    assert index.holders(HASHES, 1, rng) == {"w5": 9}
    assert index.holders(HASHES[9:], 5, rng) == {}
    index.remove("w5")
    assert next(iter(index.holders(HASHES, 5, rng))) == "w6"
