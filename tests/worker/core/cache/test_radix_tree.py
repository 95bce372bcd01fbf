from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sapwood_worker.core.cache.eviction import EvictionName
from sapwood_worker.core.cache.radix import Match, Node, RadixTree

PAGE = 2
Prefix = tuple[bytes, tuple[int, ...]]


def key(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def page_ids(start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(start, start + count, dtype=np.int32)


# Few token values and few lengths, so that prefixes meet often.
sequences = st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0)]), max_size=6).map(
    lambda pages: [token for page in pages for token in page]
)
namespaces = st.sampled_from([b"", b"tenant"])


@dataclass
class Held:
    """A locked prefix."""

    node: Node
    namespace: bytes
    tokens: list[int]


class RadixTreeAgainstModel(RuleBasedStateMachine):
    """The model: a dict from (namespace, prefix in pages) to the page id cached for its last page."""

    locked = Bundle("locked")

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE)
        self.model: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.next_page = 0
        self.ends: Counter[Node] = Counter()

    def prefixes(self, namespace: bytes, tokens: list[int]) -> list[Prefix]:
        return [(namespace, tuple(tokens[: end + PAGE])) for end in range(0, len(tokens) // PAGE * PAGE, PAGE)]

    def expected(self, namespace: bytes, tokens: list[int]) -> list[int]:
        pages = []
        for prefix in self.prefixes(namespace, tokens):
            if prefix not in self.model:
                break
            pages.append(self.model[prefix])
        return pages

    def match_and_lock(self, namespace: bytes, tokens: list[int]) -> Held:
        match = self.tree.match(key(tokens), namespace)
        assert match.pages.tolist() == self.expected(namespace, tokens)
        self.tree.lock(match.node)
        self.ends[match.node] += 1
        held = Held(match.node, namespace, tokens[: len(match.pages) * PAGE])
        for prefix in self.prefixes(namespace, held.tokens):
            self.locks[prefix] = self.locks.get(prefix, 0) + 1
        return held

    @rule(target=locked, tokens=sequences, namespace=namespaces)
    def lock(self, tokens: list[int], namespace: bytes) -> Held:
        return self.match_and_lock(namespace, tokens)

    @rule(held=consumes(locked))
    def unlock(self, held: Held) -> None:
        self.tree.unlock(held.node)
        self.ends[held.node] -= 1
        for prefix in self.prefixes(held.namespace, held.tokens):
            self.locks[prefix] -= 1

    @rule(target=locked, held=consumes(locked), more=sequences)
    def insert_below_what_is_locked(self, held: Held, more: list[int]) -> Held:
        whole = held.tokens + more
        count = len(more) // PAGE
        pages = page_ids(self.next_page, count)
        self.next_page += count
        known = self.expected(held.namespace, whole)[len(held.tokens) // PAGE :]
        result = self.tree.insert(held.node, key(more), pages)
        for prefix, page in zip(self.prefixes(held.namespace, whole)[-count:] if count else [], pages, strict=True):
            self.model.setdefault(prefix, int(page))
        assert result.pages.tolist() == known + pages.tolist()[len(known) :]
        self.tree.lock(result.node)
        self.tree.unlock(held.node)
        self.ends[held.node] -= 1
        self.ends[result.node] += 1
        for prefix in self.prefixes(held.namespace, whole)[len(held.tokens) // PAGE :]:
            self.locks[prefix] = self.locks.get(prefix, 0) + 1
        return Held(result.node, held.namespace, whole)

    @rule(tokens=sequences, namespace=namespaces, odd=st.booleans())
    def match(self, tokens: list[int], namespace: bytes, odd: bool) -> None:
        asked = [*tokens, 7] if odd else tokens
        expected = self.expected(namespace, tokens)
        unlocked = [
            prefix for prefix in self.prefixes(namespace, tokens)[: len(expected)] if not self.locks.get(prefix)
        ]
        assert self.tree.probe(key(asked), namespace) == (len(expected), len(unlocked))
        assert self.tree.match(key(asked), namespace).pages.tolist() == expected

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        evictable = {prefix for prefix in self.model if not self.locks.get(prefix)}
        freed = self.tree.evict(count).tolist()
        assert len(freed) == min(count, len(evictable))
        gone = {prefix for prefix, page in self.model.items() if page in set(freed)}
        assert len(gone) == len(freed), "a page was freed that was not cached, or twice"
        assert gone <= evictable, "a locked page was evicted"
        for prefix in gone:
            del self.model[prefix]
        for namespace, tokens in self.model:
            assert len(tokens) == PAGE or (namespace, tokens[:-PAGE]) in self.model, "a prefix went before its end"

    @invariant()
    def counters_agree(self) -> None:
        assert sorted(self.tree.check(+self.ends).tolist()) == sorted(self.model.values())
        assert self.tree.num_pages == len(self.model)
        assert self.tree.num_evictable == sum(1 for prefix in self.model if not self.locks.get(prefix))


TestRadixTreeAgainstModel = RadixTreeAgainstModel.TestCase
TestRadixTreeAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def cache(tree: RadixTree, tokens: list[int], first_page: int) -> Match:
    """Caches a sequence, unlocked."""
    found = tree.match(key(tokens))
    tree.lock(found.node)
    rest = tokens[len(found.pages) * PAGE :]
    result = tree.insert(found.node, key(rest), page_ids(first_page, len(rest) // PAGE))
    tree.unlock(found.node)
    return result


@pytest.mark.parametrize(
    ("eviction", "order"),
    [
        ("lru", [2, 3, 1]),  # 1 was used last
        ("lfu", [3, 1, 2]),  # 3 was never used again, 2 was used most often
        ("fifo", [1, 2, 3]),
        ("slru", [3, 1, 2]),  # only 2 was used twice
    ],
)
def test_each_policy_evicts_in_its_own_order(eviction: EvictionName, order: list[int]) -> None:
    tree = RadixTree(PAGE, eviction)
    for number in (1, 2, 3):
        cache(tree, [number, number], number)
        if number == 2:
            tree.match(key([2, 2]))
            tree.match(key([2, 2]))
    tree.match(key([1, 1]))
    assert [int(tree.evict(1)[0]) for _ in range(3)] == order
    assert tree.evict(1).tolist() == []


def test_eviction_takes_no_more_than_it_is_asked_for_from_the_end_of_a_run() -> None:
    tree = RadixTree(PAGE)
    cache(tree, [1, 1, 2, 2, 3, 3], 10)
    assert tree.evict(1).tolist() == [12]
    assert tree.match(key([1, 1, 2, 2, 3, 3])).pages.tolist() == [10, 11]
    cache(tree, [1, 1, 2, 2, 4, 4], 20)
    assert tree.match(key([1, 1, 2, 2, 4, 4])).pages.tolist() == [10, 11, 20]


def test_what_others_cached_meanwhile_is_kept_and_what_is_new_is_taken() -> None:
    tree = RadixTree(PAGE)
    root = tree.match(key([]))
    tree.lock(root.node)
    tree.insert(root.node, key([1, 1, 2, 2]), page_ids(0, 2))
    second = tree.insert(root.node, key([1, 1, 2, 2, 3, 3]), page_ids(10, 3))
    assert second.pages.tolist() == [0, 1, 12]


def test_namespaces_that_hold_nothing_are_forgotten() -> None:
    tree = RadixTree(PAGE)
    for number in range(100):
        namespace = str(number).encode()
        found = tree.match(key([1, 1]), namespace)
        tree.lock(found.node)
        tree.insert(found.node, key([1, 1]), page_ids(number, 1))
        tree.unlock(found.node)
    assert len(tree._roots) == 100
    tree.evict(99)
    assert list(tree._roots) == [b"99"]


def test_many_touches_do_not_grow_the_eviction_queue() -> None:
    tree = RadixTree(PAGE)
    cache(tree, [1, 1], 0)
    for _ in range(1_000):
        found = tree.match(key([1, 1]))
        tree.lock(found.node)
        tree.unlock(found.node)
    assert len(tree._queue) == 1
