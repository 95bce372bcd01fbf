"""Names of pages outside the device, and the log of what was stored and removed under them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from sapwood_common.contract.page_hash import lora_of
from sapwood_worker.records.kv_events import BlockStored, KvEvent, Medium

# Names of pages outside the device: each name identifies a page's tokens and can be verified.
#
# Algorithm: two chained hashes a page, each over the page's tokens and the hash of the page before it. ``hash`` is the
# xxh3 chain that router and workers share (``sapwood_common.contract.page_hash``): quick, and the name under which a
# page is found. ``proof`` is a SHA-256 chain, for which nobody can find a collision: a reader of a page compares it, so a
# page is only ever used for exactly the tokens, in exactly the namespace, that it was computed for. O(tokens), once a
# page.


class PageKey(NamedTuple):
    """A page's name: 16 bytes of ``hash``, 32 bytes of ``proof``; each covers all pages before it as well."""

    hash: bytes
    proof: bytes


class PageName(NamedTuple):
    """A page: its key, the hash of the page before it (empty: none), its tokens as native uint32, its LoRA."""

    key: PageKey
    parent: bytes
    token_ids: bytes
    lora: str


class PageChain:
    """The keys of the full pages of one token sequence, first page first; grows with the sequence.

    Args:
        namespace: Sequences of different namespaces share no keys.
        page_size: Tokens in a page.
        known: The first pages, if they are known already.

    Attributes:
        pages: All pages so far.
    """

    def __init__(self, namespace: bytes, page_size: int, known: list[PageName] | None = None) -> None:
        self._page_size = page_size
        self._root = PageKey(namespace, hashlib.sha256(namespace).digest())
        self._lora = lora_of(namespace)
        self.pages: list[PageName] = [] if known is None else known

    @property
    def keys(self) -> list[PageKey]:
        """The keys of all pages so far."""
        return [page.key for page in self.pages]

    def resume(self, known: Sequence[PageName], token_ids: array[int]) -> None:
        """Takes the pages of another chain, if that chain was of this sequence; called while there are no pages."""
        self.extend(token_ids, self._page_size)
        content = b"".join(page.token_ids for page in known)
        if known and self.pages and known[0].key == self.pages[0].key and token_ids.tobytes().startswith(content):
            self.pages = list(known)

    def extend(self, token_ids: array[int], end: int) -> None:
        """Adds the missing full pages among the sequence's first ``end`` tokens."""
        size = self._page_size
        parent = self.pages[-1].key if self.pages else self._root
        for start in range(len(self.pages) * size, end - size + 1, size):
            page = token_ids[start : start + size].tobytes()
            before = parent
            parent = PageKey(xxhash.xxh3_128_digest(parent.hash + page), hashlib.sha256(parent.proof + page).digest())
            self.pages.append(PageName(parent, b"" if before is self._root else before.hash, page, self._lora))


# KV events in the order in which they happened.


class KvEventLog:
    """Events in the order they happened, until they are taken."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def add(self, event: KvEvent) -> None:
        """Appends an event."""
        self._events.append(event)

    def stored(self, names: Iterable[PageName], medium: Medium) -> None:
        """Notes that pages are cached on a medium; consecutive pages are one event."""
        run: list[PageName] = []
        for name in names:
            if run and (name.parent, name.lora) != (run[-1].key.hash, run[-1].lora):
                self.add(_stored(run, medium))
                run = []
            run.append(name)
        if run:
            self.add(_stored(run, medium))

    def take(self) -> list[KvEvent]:
        """Removes and returns the events since the last call."""
        events, self._events = self._events, []
        return events


def _stored(run: list[PageName], medium: Medium) -> BlockStored:
    hashes = b"".join(name.key.hash for name in run)
    return BlockStored(hashes, run[0].parent, b"".join(name.token_ids for name in run), medium, run[0].lora)
