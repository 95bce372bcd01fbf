"""The prefix index against a plain model of itself, and its bounds."""

import itertools
import math
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.page_hash import hash_pages
from sapwood_router.routing.index.prefixes import ENTRY_BYTES, PrefixIndex

PAGE = 2


def clock() -> Callable[[], float]:
    """Each reading is a second after the last."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


class Model:
    """The same by brute force: a list of prefixes a worker, oldest first, each a tuple of tokens."""

    def __init__(self, budget_entries: int) -> None:
        self.budget = budget_entries
        self.held: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        self.capacity: dict[str, int] = {}
        self.tick = 0

    def reset(self, worker: str, capacity: int) -> None:
        self.held.pop(worker, None)
        self.capacity[worker] = capacity

    def overlap(self, worker: str, tokens: tuple[int, ...]) -> int:
        held = {prefix for prefix, _ in self.held.get(worker, [])}
        count = 0
        while (count + 1) * PAGE <= len(tokens) and tokens[: (count + 1) * PAGE] in held:
            count += 1
        return count

    def insert(self, worker: str, tokens: tuple[int, ...]) -> tuple[set[tuple[int, ...]], int]:
        self.tick += 1
        held = self.held.setdefault(worker, [])
        known = {prefix for prefix, _ in held}
        for pages in range(len(tokens) // PAGE, 0, -1):
            prefix = tokens[: pages * PAGE]
            held[:] = [item for item in held if item[0] != prefix]
            held.append((prefix, self.tick))
        while len(held) > self.capacity.get(worker, 10**9):
            held.pop(0)
        while sum(map(len, self.held.values())) > self.budget:
            min((entries for entries in self.held.values() if entries), key=lambda entries: entries[0][1]).pop(0)
        whole = {tokens[: pages * PAGE] for pages in range(1, len(tokens) // PAGE + 1)}
        return whole - known, self.tick

    def take_back(self, worker: str, new: set[tuple[int, ...]], tick: int) -> None:
        held = self.held.get(worker, [])
        held[:] = [(prefix, used) for prefix, used in held if prefix not in new or used != tick]


prompts = st.lists(st.integers(0, 2), max_size=9).map(tuple)
workers = st.sampled_from(["a", "b", "c"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), workers, prompts),
        st.tuples(st.just("insert"), workers, prompts),
        st.tuples(st.just("reset"), workers, st.integers(0, 12)),
        st.tuples(st.just("take back"), workers, st.integers(0, 9)),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(0, 20), st.lists(prompts, min_size=1, max_size=5))
def test_the_index_answers_as_brute_force_does_and_keeps_its_budget(steps, budget, asked) -> None:
    index, model = PrefixIndex(budget * ENTRY_BYTES, clock()), Model(budget)
    done = []
    for action, worker, argument in steps:
        if action == "insert":
            hashes = hash_pages(argument, PAGE)
            done.append((worker, hashes, index.insert(worker, hashes), model.insert(worker, argument)))
        elif action == "take back":
            if argument < len(done):
                worker, hashes, insertion, (new, tick) = done[argument]
                index.take_back(worker, hashes, insertion)
                model.take_back(worker, new, tick)
        else:
            index.reset(worker, argument)
            model.reset(worker, argument)
        assert index.bytes_used <= budget * ENTRY_BYTES
        for worker in "abc":
            assert index.entries(worker) == len(model.held.get(worker, []))
    for worker in "abc":
        for tokens in (*asked, *(step[2] for step in steps if step[0] == "insert")):
            hashes, known = hash_pages(tokens, PAGE), model.overlap(worker, tokens)
            assert index.overlap(worker, hashes) == known
            for beyond in range(len(hashes) + 2):
                assert index.beyond({worker: beyond}, hashes, math.inf) == ({worker: known} if known > beyond else {})


def test_memory_stays_within_the_budget_over_many_distinct_prompts() -> None:
    rng, budget = random.Random(1), 1024 * 1024
    tracemalloc.start()
    index = PrefixIndex(budget, clock())
    for number in range(5_000):
        index.insert(f"worker-{number % 4}", [rng.randbytes(16) for _ in range(8)])
        assert index.bytes_used <= budget
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert budget * 0.5 < used <= budget
    assert all(index.entries(f"worker-{number}") for number in range(4))


def test_a_worker_is_believed_to_hold_no_more_than_it_has_room_for() -> None:
    index = PrefixIndex(1 << 30, clock())
    index.reset("a", 10)
    first, second = (hash_pages([salt] * 16, PAGE) for salt in (1, 2))
    index.insert("a", first)
    index.insert("a", second)
    assert index.entries("a") == 10
    assert index.overlap("a", second) == 8
    assert index.overlap("a", first) == 2  # its start is the last to go


def test_what_was_used_long_ago_counts_only_if_it_may() -> None:
    now = 0.0
    index = PrefixIndex(1 << 20, lambda: now)
    old, new = hash_pages(range(8), PAGE), hash_pages(range(4), PAGE)
    index.insert("a", old)
    now = 10.0
    index.insert("a", new)
    now = 12.0
    assert index.overlap("a", old) == 4
    assert index.overlap("a", old, within=5.0) == 2
    assert index.overlap("a", old, within=1.0) == 0


@pytest.mark.slow
def test_memory_is_flat_over_a_million_distinct_prompts() -> None:
    budget = 4_000_000
    index = PrefixIndex(budget, lambda: 0.0)
    resident = []
    for number in range(1_000_000):
        index.insert(f"w{number % 4}", [(4 * number + page).to_bytes(16) for page in range(4)])
        if number % 100_000 == 99_999:
            assert budget * 0.9 < index.bytes_used <= budget
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert max(resident[1:]) - resident[1] < 2_000_000
