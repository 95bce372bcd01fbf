"""The radix tree of cached prefixes, its nodes, and what a match finds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt
import xxhash

from sapwood_common.contract.page_hash import HASH_BYTES, hash_run, lora_of
from sapwood_worker.core.cache.eviction import POLICIES, EvictionName, EvictionQueue
from sapwood_worker.core.cache.page_key import KvEventLog, PictureNames
from sapwood_worker.records.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

PageIds = npt.NDArray[np.int32]

TOKEN_BYTES = 4
"""Bytes of a token id in a key, which is a sequence of native uint32."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages that follows the pages of its parent, or a part of one page.

    Attributes:
        key: The token ids of its pages; of a root, its namespace. A part of a page has fewer than a page, and nothing follows.
        pages: int32, its page ids.
        hashes: The chained hashes of its pages, 16 bytes each; empty for a part of a page.
        parent: None for a root and for a node that has been evicted.
        children: By the bytes of their first page.
        firsts: The keys of ``children``, sorted.
        locks: How many locks it and all nodes below it have.
        created: When it was cached, by the tree's tick.
        used: When it was last matched or cached, by the tree's tick.
        hits: How often it was matched.
        queued: Whether the eviction queue has an entry for it.
    """

    key: bytes
    pages: PageIds
    hashes: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    firsts: list[bytes] = field(default_factory=list)
    locks: int = 0
    created: int = 0
    used: int = 0
    hits: int = 0
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: its last node (a root if nothing matched) and its pages, int32, from the start."""

    node: Node
    pages: PageIds


def is_free_leaf(node: Node) -> bool:
    """Whether eviction may take the node."""
    return node.parent is not None and not node.children and not node.locks


def root_of(node: Node) -> Node:
    """The root above a node, whose key is the namespace."""
    while node.parent is not None:
        node = node.parent
    return node


# The radix tree of cached prefixes, over pages of token ids.
#
# Algorithm: each edge is a run of whole pages (as in SGLang's RadixAttention; a PATRICIA tree with pages as letters); a
# child is found by the bytes of its first page. A node that a running request uses is locked, and so are all nodes above it.
# Only unlocked leaves are evicted, from their end, so the remainder of a cached sequence is always a prefix of it.
#
# Complexity, for a sequence of n pages: match and insert compare O(n) bytes (in C, a run at a time), lock and unlock
# take O(depth), eviction takes O(log leaves) for each node. Only eviction depends on the number of cached pages. Bound: at most
# one node for each page.
#
# A page that is not full is a leaf too, a part of a page: no request begins with it, but a request may begin with a copy of it.
# Such a copy may be of a full page as well. Of all pages below a node the one with the longest common beginning stands beside
# the place in their sorted order where the wanted tokens would stand: O(log children).
#
# Namespaces (a tenant's salt, a LoRA) share nothing.


_MOST_CHILDREN = 64
"""The most children of a node that are searched for a part of a page."""

_NONE: PageIds = np.empty(0, dtype=np.int32)


class RadixTree:
    """Cached prefixes and their pages. Does not know the owners of other pages.

    Args:
        page_size: Tokens in a page.
        eviction: Which leaf is evicted first.
        events: Records what is stored and removed; None: nothing is recorded.
        pictures: The names of pictures in the keys; None: there are none.
        alone: Whether there are no tiers below, so that an empty tree means an empty cache.
    """

    def __init__(
        self,
        page_size: int,
        eviction: EvictionName = "lru",
        events: KvEventLog | None = None,
        pictures: PictureNames | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._events = events
        self._pictures = pictures
        self._alone = alone
        self._stride = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._tick = 0
        self.num_locks = 0
        """Locks taken and not released."""
        self._pages = 0
        self._evictable = 0
        self._queue: EvictionQueue[Node] = EvictionQueue(POLICIES[eviction], is_free_leaf)

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self._pages

    @property
    def num_evictable(self) -> int:
        """Pages that no lock protects."""
        return self._evictable

    def match(self, key: bytes, namespace: bytes = b"") -> Match:
        """The longest cached prefix of ``key``, in whole pages; of ``key`` too, only whole pages count.

        Marks the prefix as used and splits a node if only its first part matches; the cached pages stay the same.
        The pages stay valid until the next eviction: lock the node to keep them.
        """
        self._tick += 1
        return self._walk(self._root(namespace), self._whole(key), hit=True)

    def probe(
        self, key: bytes, namespace: bytes = b"", usable: Callable[[PageIds], int] | None = None
    ) -> tuple[int, int]:
        """How many pages :meth:`match` would find, and how many of these no lock protects; changes nothing.

        Args:
            key, namespace: As for :meth:`match`.
            usable: Returns how many of a prefix's pages can be used; only these are counted. None: all can.
        """
        node, key = self._roots.get(namespace), self._whole(key)
        found = unlocked = 0
        runs: list[tuple[PageIds, int]] = []
        while node is not None:
            offset = found * self._stride
            child = node.children.get(key[offset : offset + self._stride])
            if child is None:
                break
            common = _common(child.key, key, offset, self._stride)
            found += common // self._stride
            unlocked += 0 if child.locks else common // self._stride
            if usable is not None:
                runs.append((child.pages[: common // self._stride], child.locks))
            node = child if common == len(child.key) else None
        if usable is None or not runs:
            return found, unlocked
        found = left = usable(np.concatenate([pages for pages, _ in runs]))
        unlocked = 0
        for pages, locks in runs:
            unlocked += 0 if locks else max(0, min(left, len(pages)))
            left -= len(pages)
        return found, unlocked

    def extent(self, key: bytes, namespace: bytes = b"") -> int:
        """How many tokens :meth:`match` and then :meth:`beginning` would find; changes nothing."""
        node = self._roots.get(namespace)
        offset = 0
        while node is not None:
            wanted = key[offset : offset + self._stride]
            if (child := node.children.get(wanted)) is None:
                found = self.beginning(node, wanted)
                return offset // TOKEN_BYTES + (0 if found is None else found[1])
            common = _common(child.key, key, offset, TOKEN_BYTES)
            offset += common
            node = child if common == len(child.key) else None
        return offset // TOKEN_BYTES

    def path(self, key: bytes, namespace: bytes = b"") -> list[int]:
        """The path that :meth:`match` would take: a number for each node, the root first; changes nothing.

        The paths of two keys begin with the same numbers while the keys run through the same nodes. Valid until the tree changes.
        """
        node, key = self._roots.get(namespace), self._whole(key)
        numbers: list[int] = []
        offset = 0
        while node is not None:
            numbers.append(id(node))
            child = node.children.get(key[offset : offset + self._stride])
            if child is None:
                break
            common = _common(child.key, key, offset, self._stride)
            offset += common
            if common < len(child.key):
                numbers.append(id(child))
                break
            node = child
        return numbers

    def continuation(self, below: Node, key: bytes) -> bytes:
        """The tokens that follow ``key`` in a cached sequence below a node that begins with ``key``; changes nothing.

        If there are several such sequences, the one cached last is used. ``key`` may end with a part of a page.

        Returns:
            Token ids to the end of a node; empty if there is none.
        """
        offset, stride = 0, self._stride
        while len(key) - offset >= stride:
            child = below.children.get(key[offset : offset + stride])
            if child is None:
                return b""
            if len(child.key) > len(key) - offset:
                return child.key[len(key) - offset :] if child.key.startswith(key[offset:]) else b""
            if not key.startswith(child.key, offset):
                return b""
            offset += len(child.key)
            below = child
        rest = key[offset:]
        part = b""
        for first, child in islice(reversed(below.children.items()), _MOST_CHILDREN):
            if first.startswith(rest):
                if len(first) == stride:
                    return child.key[len(rest) :]
                part = part or first[len(rest) :]
        return part

    def beginning(self, below: Node, tokens: bytes) -> tuple[Node, int] | None:
        """The page below a node that has the longest beginning in common with ``tokens``; changes nothing.

        Args:
            below: A node.
            tokens: Tokens that follow the node's, at most a page.

        Returns:
            The node that begins with the page, and how many tokens of it are ``tokens``'; None: there is no such page.
        """
        firsts = below.firsts
        if not firsts:
            return None
        place = bisect_left(firsts, tokens)
        found, most = b"", 0
        for first in firsts[max(0, place - 1) : place + 1]:
            if (common := _common(first, tokens, 0, TOKEN_BYTES)) > most:
                found, most = first, common
        return (below.children[found], most // TOKEN_BYTES) if most else None

    def first_page(self, node: Node) -> Node:
        """Splits a node so that it ends with its first page; returns the node of that page."""
        return self._split(node, self._stride) if len(node.pages) > 1 else node

    def insert_part(self, below: Node, tokens: bytes, page: int) -> Node | None:
        """Caches a part of a page as a continuation of a cached prefix.

        Args:
            below: The prefix's last node, locked.
            tokens: The part's token ids, fewer than a page's; at least one.
            page: The page, which the tree takes. Its owner may go on to write behind these tokens.

        Returns:
            The part's node; None if the tree has a page that begins with these tokens: it does not take the page then.
        """
        assert 0 < len(tokens) < self._stride
        if self._begins(below, tokens):
            return None
        self._tick += 1
        part = Node(tokens, np.array([page], np.int32), b"", below, created=self._tick, used=self._tick)
        _adopt(below, part, tokens)
        self._pages += 1
        self._evictable += 1
        self._queue.offer(part)
        return part

    def grow(self, part: Node, key: bytes, pages: PageIds) -> bool:
        """Has a part of a page, which is locked, hold more tokens: those that its owner has written since.

        Args:
            part: The part of a page.
            key: The token ids from the page's first on: a part of a page, or whole pages.
            pages: Their pages; the first is the part's own.

        Returns:
            Whether it does. If not, the tree has other pages that begin with these tokens, and the part is left as it is.
        """
        below = part.parent
        assert below is not None and part.locks and pages[0] == part.pages[0]
        whole = len(key) >= self._stride
        # The part itself begins with no more tokens than it has.
        if key[: self._stride] in below.children or (not whole and self._begins(below, key)):
            return False
        _orphan(below, part.key)
        self._tick += 1
        part.key, part.pages, part.used = key, pages, self._tick
        self._pages += len(pages) - 1
        _adopt(below, part, key[: self._stride])
        if whole:
            self._announce(part)
        return True

    def _whole(self, key: bytes) -> bytes:
        """The whole pages of a key."""
        return key[: len(key) // self._stride * self._stride]

    def _begins(self, below: Node, tokens: bytes) -> bool:
        """Whether a page below a node begins with these tokens, fewer than a page's."""
        place = bisect_left(below.firsts, tokens)
        return place < len(below.firsts) and below.firsts[place].startswith(tokens)

    def insert(self, below: Node, key: bytes, pages: PageIds) -> Match:
        """Caches whole pages as the continuation of a cached prefix.

        Args:
            below: The prefix's last node, from :meth:`match` or an earlier insertion, and locked since.
            key: The continuation's token ids, a multiple of the page.
            pages: Their pages. The tree takes the pages whose tokens it does not have yet.

        Returns:
            The continuation's last node and its pages as cached now. Where a page differs from that in ``pages``, the tree
            already had one with these tokens; the caller then keeps its own page, a second copy of the same KV.
        """
        assert len(key) == len(pages) * self._stride
        self._tick += 1
        known = self._walk(below, key, hit=False)
        count = len(known.pages)
        if count == len(pages):
            return known
        rest = key[count * self._stride :]
        leaf = self._leaf(known.node, rest, pages[count:].copy())
        self._pages += len(leaf.pages)
        self._evictable += len(leaf.pages)
        self._queue.offer(leaf)
        return Match(leaf, np.concatenate((known.pages, leaf.pages)))

    def lock(self, node: Node) -> None:
        """Protects a node and all above it from eviction; locks count."""
        self.num_locks += 1
        at: Node | None = node
        while at is not None:
            if at.locks == 0:
                self._evictable -= len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Takes one lock back."""
        self.num_locks -= 1
        at: Node | None = node
        while at is not None:
            assert at.locks > 0, "unlocked more often than locked"
            parent = at.parent
            at.locks -= 1
            if at.locks == 0:
                self._evictable += len(at.pages)
                self._offer(at)
            at = parent

    def evict(self, count: int, *, reset: bool = False) -> PageIds:
        """Takes the last ``count`` pages out of the lowest-ranked unlocked leaves, or all that the leaves have.

        Args:
            count: How many.
            reset: Whether this is part of a reset; if the tree is then empty, the event is AllBlocksCleared.

        Returns:
            The pages taken out, int32.
        """
        freed: list[PageIds] = []
        removed: list[bytes] = []
        while count > 0 and (node := self._queue.pop()) is not None:
            keep = max(0, len(node.pages) - count)
            freed.append(node.pages[keep:])
            if node.hashes:
                removed.append(node.hashes[keep * HASH_BYTES :])
            count -= len(node.pages) - keep
            parent = node.parent
            assert parent is not None
            if keep:
                node.pages, node.key = node.pages[:keep], node.key[: keep * self._stride]
                node.hashes = node.hashes[: keep * HASH_BYTES]
                self._queue.offer(node)
            else:
                _orphan(parent, node.key[: self._stride])
                node.parent = None
                self._offer(parent)
        pages = np.concatenate(freed) if freed else _NONE
        self._pages -= len(pages)
        self._evictable -= len(pages)
        if self._events is not None and removed:
            cleared = reset and not self._pages and self._alone
            self._events.add(AllBlocksCleared() if cleared else BlockRemoved(b"".join(removed)))
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, ends: Mapping[Node, int]) -> PageIds:
        """Compares locks and counters with the tree; O(nodes).

        Args:
            ends: How many locks are held at each node.

        Returns:
            All pages in the tree, in no order.

        Raises:
            AssertionError: They disagree.
        """
        total = evictable = found = 0
        pages = [_NONE]
        for root in self._roots.values():
            assert root.locks == sum(child.locks for child in root.children.values()) + ends.get(root, 0)
            found += root in ends
        for node in self.nodes():
            assert node.parent is not None and node.parent.children[node.key[: self._stride]] is node
            assert node.firsts == sorted(node.children), "the children are not in order"
            count = len(node.pages)
            if is_part := 0 < len(node.key) < self._stride:
                assert count == 1 and not node.children and not node.hashes
            assert is_part or len(node.key) == count * self._stride > 0
            assert is_part or len(node.hashes) == count * HASH_BYTES
            locks = 0
            for child in node.children.values():
                locks += child.locks
            if node in ends:
                locks += ends[node]
                found += 1
            assert node.locks == locks, "locks are not balanced"
            assert locks or node.children or node.queued, "an unlocked leaf that eviction cannot find"
            total += count
            if not locks:
                evictable += count
            pages.append(node.pages)
        assert found == len(ends), "what is locked is not in the tree"
        assert (total, evictable) == (self._pages, self._evictable), "the counters are wrong"
        return np.concatenate(pages)

    def _root(self, namespace: bytes) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, _NONE, b"", None)
        return root

    def _leaf(self, parent: Node, key: bytes, pages: PageIds) -> Node:
        """A new leaf below ``parent``, announced."""
        leaf = Node(key, pages, b"", parent, created=self._tick, used=self._tick)
        _adopt(parent, leaf, key[: self._stride])
        self._announce(leaf)
        return leaf

    def _announce(self, node: Node) -> None:
        """Hashes the whole pages of a new leaf, and reports them."""
        parent = node.parent
        assert parent is not None
        below = parent.hashes[-HASH_BYTES:]
        node.hashes = b"".join(self._hashes(below or parent.key, node.key))
        if self._events is not None:
            self._events.add(BlockStored(node.hashes, below, node.key, lora=lora_of(root_of(parent).key)))

    def _hashes(self, parent: bytes, key: bytes) -> list[bytes]:
        if self._pictures is None or not self._pictures.among(key):
            return hash_run(parent, key, self._stride)
        hashes: list[bytes] = []
        for start in range(0, len(key), self._stride):
            parent = xxhash.xxh3_128_digest(parent + self._pictures.content(key[start : start + self._stride]))
            hashes.append(parent)
        return hashes

    def _walk(self, node: Node, key: bytes, *, hit: bool) -> Match:
        """Follows ``key`` down from ``node`` and splits a run in which it ends; returns the pages below ``node``."""
        offset = 0
        pages: list[PageIds] = []
        while (child := node.children.get(key[offset : offset + self._stride])) is not None:
            common = _common(child.key, key, offset, self._stride)
            if common < len(child.key):
                child = self._split(child, common)
            child.used = self._tick
            child.hits += hit
            pages.append(child.pages)
            offset += common
            node = child
        return Match(node, np.concatenate(pages) if pages else _NONE)

    def _split(self, node: Node, at: int) -> Node:
        """Puts the first ``at`` bytes of a node's run into a new parent; returns that.

        The node itself keeps the end of its run, so every prefix that ended at the node still ends there.
        """
        assert node.parent is not None and 0 < at < len(node.key)
        count = at // self._stride
        upper = Node(
            node.key[:at],
            node.pages[:count],
            node.hashes[: count * HASH_BYTES],
            node.parent,
            locks=node.locks,
            created=node.created,
            used=node.used,
            hits=node.hits,
        )
        node.parent.children[upper.key[: self._stride]] = upper
        node.key, node.pages, node.hashes = node.key[at:], node.pages[count:], node.hashes[count * HASH_BYTES :]
        node.parent = upper
        _adopt(upper, node, node.key[: self._stride])
        return upper

    def _offer(self, node: Node) -> None:
        """Queues a node for eviction if it has become an unlocked leaf; forgets an empty root."""
        if is_free_leaf(node):
            self._queue.offer(node)
        elif node.parent is None and not node.children and not node.locks and self._roots.get(node.key) is node:
            del self._roots[node.key]


def _common(run: bytes, key: bytes, offset: int, unit: int) -> int:
    """The length in bytes, in whole units, of the common beginning of a run and the key from ``offset`` on."""
    if key.startswith(run, offset):
        return len(run) // unit * unit
    # Binary search: a longer prefix matches only if every shorter one does.
    low, high = 0, min(len(run), len(key) - offset) // unit
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(run[: middle * unit], offset):
            low = middle
        else:
            high = middle - 1
    return low * unit


def _adopt(parent: Node, child: Node, first: bytes) -> None:
    parent.children[first] = child
    insort(parent.firsts, first)


def _orphan(parent: Node, first: bytes) -> None:
    del parent.children[first]
    del parent.firsts[bisect_left(parent.firsts, first)]
