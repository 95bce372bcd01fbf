"""A radix tree that checks each of its own answers against the plainest model there is; for tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sapwood_worker.core.cache.eviction import EvictionName
from sapwood_worker.core.cache.radix import TOKEN_BYTES, Match, Node, PageIds, RadixTree

Prefix = tuple[bytes, bytes]


class CheckedTree(RadixTree):
    """Along with the tree it keeps a dict from (namespace, all tokens up to the end of a page, or of a part of one) to the page,
    and locks by prefix.

    Each method raises AssertionError where tree and dict disagree. Every operation is O(pages x tokens).
    """

    def __init__(self, page_size: int, eviction: EvictionName = "lru") -> None:
        super().__init__(page_size, eviction)
        self._model: dict[Prefix, int] = {}
        self._model_locks: dict[Prefix, int] = {}

    def match(self, key: bytes, namespace: bytes = b"") -> Match:
        expected = self._expected(namespace, key)
        assert super().probe(key, namespace)[0] == len(expected)
        match = super().match(key, namespace)
        assert match.pages.tolist() == expected, "the tree found another prefix than the longest"
        return match

    def probe(
        self, key: bytes, namespace: bytes = b"", usable: Callable[[PageIds], int] | None = None
    ) -> tuple[int, int]:
        found = self._expected(namespace, key)
        most = len(found) if usable is None else usable(np.array(found, np.int32))
        expected = self._prefixes(namespace, key)[:most]
        answer = super().probe(key, namespace, usable)
        assert answer == (len(expected), sum(not self._model_locks.get(prefix) for prefix in expected))
        return answer

    def insert(self, below: Node, key: bytes, pages: PageIds) -> Match:
        namespace, above = _whole(below)
        prefixes = self._prefixes(namespace, above + key)[len(above) // self._stride :]
        for prefix, page in zip(prefixes, pages.tolist(), strict=True):
            self._model.setdefault(prefix, page)
        match = super().insert(below, key, pages)
        assert match.pages.tolist() == [self._model[prefix] for prefix in prefixes], "the tree cached something else"
        return match

    def beginning(self, below: Node, tokens: bytes) -> tuple[Node, int] | None:
        namespace, above = _whole(below)
        rests = {
            prefix[1][len(above) :]: page
            for prefix, page in self._model.items()
            if prefix[0] == namespace
            and prefix[1].startswith(above)
            and 0 < len(prefix[1]) - len(above) <= self._stride
        }
        answer = super().beginning(below, tokens)
        assert (answer[1] if answer else 0) == max((common_tokens(rest, tokens) for rest in rests), default=0)
        if answer is not None:
            page = int(answer[0].pages[0])
            assert any(common_tokens(rest, tokens) == answer[1] and page == at for rest, at in rests.items())
        return answer

    def extent(self, key: bytes, namespace: bytes = b"") -> int:
        answer = super().extent(key, namespace)
        cached = (common_tokens(tokens, key) for other, tokens in self._model if other == namespace)
        assert answer == max(cached, default=0), "the tree found fewer tokens than are cached, or more"
        return answer

    def insert_part(self, below: Node, tokens: bytes, page: int) -> Node | None:
        namespace, above = _whole(below)
        known = any(other == namespace and each.startswith(above + tokens) for other, each in self._model)
        part = super().insert_part(below, tokens, page)
        assert (part is None) == known
        if part is not None:
            self._model[namespace, above + tokens] = page
        return part

    def grow(self, part: Node, key: bytes, pages: PageIds) -> bool:
        assert part.parent is not None
        (namespace, above), (_, old) = _whole(part.parent), _whole(part)
        first = above + key[: self._stride]
        known = any(other == namespace and each.startswith(first) for other, each in self._model)
        grown = super().grow(part, key, pages)
        assert grown is not known
        if grown:
            del self._model[namespace, old]
            locks = self._model_locks.pop((namespace, old))
            for prefix, page in zip(
                self._all(namespace, above + key)[len(above) // self._stride :], pages, strict=True
            ):
                self._model[prefix], self._model_locks[prefix] = int(page), locks
        return grown

    def lock(self, node: Node) -> None:
        for prefix in self._all(*_whole(node)):
            assert prefix in self._model, "what is locked is not cached"
            self._model_locks[prefix] = self._model_locks.get(prefix, 0) + 1
        super().lock(node)

    def unlock(self, node: Node) -> None:
        for prefix in self._all(*_whole(node)):
            self._model_locks[prefix] -= 1
            if not self._model_locks[prefix]:
                del self._model_locks[prefix]
        super().unlock(node)

    def evict(self, count: int, *, reset: bool = False) -> PageIds:
        evictable = len(self._model) - len(self._model_locks)
        assert evictable == self.num_evictable
        freed = super().evict(count, reset=reset)
        assert len(freed) == min(count, evictable), "not as many pages as asked for"
        gone = set(freed.tolist())
        out = {prefix for prefix, page in self._model.items() if page in gone}
        assert len(out) == len(freed), "a page was evicted that was not cached, or twice"
        assert not out & self._model_locks.keys(), "a locked page was evicted"
        for prefix in out:
            del self._model[prefix]
        for namespace, tokens in self._model if out else ():
            above = tokens[: (len(tokens) - 1) // self._stride * self._stride]
            assert not above or (namespace, above) in self._model, "a page went before what follows it"
        return freed

    def compare(self) -> None:
        """Compares all of the tree with the dict."""
        found: dict[Prefix, int] = {}
        for node in self.nodes():
            namespace, tokens = _whole(node)
            pages = node.pages.tolist()
            found.update(zip(self._all(namespace, tokens)[-len(pages) :], pages, strict=True))
        assert found == self._model, "the tree holds other pages than were cached"

    def _all(self, namespace: bytes, key: bytes) -> list[Prefix]:
        """Up to the end of each page, and of the part of a page at the end."""
        return self._prefixes(namespace, key) + ([(namespace, key)] if len(key) % self._stride else [])

    def _prefixes(self, namespace: bytes, key: bytes) -> list[Prefix]:
        return [
            (namespace, key[: end + self._stride])
            for end in range(0, len(key) // self._stride * self._stride, self._stride)
        ]

    def _expected(self, namespace: bytes, key: bytes) -> list[int]:
        pages: list[int] = []
        for prefix in self._prefixes(namespace, key):
            if prefix not in self._model:
                break
            pages.append(self._model[prefix])
        return pages


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two sequences have in common at their beginning."""
    at = next((at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its), None)
    return (min(len(one), len(other)) if at is None else at) // TOKEN_BYTES


def _whole(node: Node) -> Prefix:
    """Namespace and tokens of everything from the root to the end of a node."""
    tokens = b""
    while node.parent is not None:
        tokens = node.key + tokens
        node = node.parent
    return node.key, tokens
