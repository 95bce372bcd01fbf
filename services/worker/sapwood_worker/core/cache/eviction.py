"""Which cached prefix is evicted first when room is needed.

A policy ranks a node of the radix tree; the lowest rank is evicted first. A node's rank never falls. So :class:`EvictionQueue`
holds one entry for each node, and reads the node's new rank only when its entry reaches the top.

Complexity: offer and pop take O(log candidates); a pop queues each node again whose rank grew since it was offered.
Bound: one entry for each node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeVar

EvictionName = Literal["lru", "lfu", "fifo", "slru"]
Rank = tuple[int, int]


class Candidate(Protocol):
    """The facts by which a policy may rank a node.

    Attributes:
        created: When it was cached, by the tree's tick.
        used: When it was last matched or cached, by the tree's tick.
        hits: How often it was matched.
        queued: Whether an eviction queue has an entry for it; the queue's own mark.
    """

    created: int
    used: int
    hits: int
    queued: bool


def least_recently_used(node: Candidate) -> Rank:
    """LRU: the least recently used first."""
    return node.used, 0


def least_frequently_used(node: Candidate) -> Rank:
    """LFU: the least often used first; among equals the least recently used."""
    return node.hits, node.used


def first_in_first_out(node: Candidate) -> Rank:
    """FIFO: the oldest first."""
    return node.created, 0


def segmented_lru(node: Candidate) -> Rank:
    """SLRU (Karedla, Love and Wherry, 1994): nodes matched at least twice outlive a flood of nodes that were never matched."""
    return int(node.hits > 1), node.used


POLICIES: dict[EvictionName, Callable[[Candidate], Rank]] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
    "slru": segmented_lru,
}

NodeT = TypeVar("NodeT", bound=Candidate)


class EvictionQueue(Generic[NodeT]):
    """Nodes that may be evictable, lowest rank first.

    Args:
        rank: The policy.
        evictable: Whether a node can be evicted now; a node that no longer can is dropped when its entry reaches the top.
    """

    def __init__(self, rank: Callable[[NodeT], Rank], evictable: Callable[[NodeT], bool]) -> None:
        self._rank = rank
        self._evictable = evictable
        self._order = 0
        self._heap: list[tuple[Rank, int, NodeT]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: NodeT) -> None:
        """Adds a node that has become evictable; does nothing if the queue has it already."""
        if not node.queued:
            node.queued = True
            self._push(node)

    def pop(self) -> NodeT | None:
        """Takes out the evictable node of lowest rank; None if there is none."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if not self._evictable(node):
                node.queued = False
            elif self._rank(node) > rank:
                self._push(node)
            else:
                node.queued = False
                return node
        return None

    def _push(self, node: NodeT) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self._rank(node), self._order, node))
