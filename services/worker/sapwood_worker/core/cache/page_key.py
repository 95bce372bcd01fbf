"""Names of pages outside the device, and the log of what was stored and removed under them."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
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


# Pictures. Their tokens all have one id, so in the keys of the tree and in pages' tokens each distinct picture has a number
# instead, which only this process knows. ``hash`` and ``proof`` are made of the id and the picture's whole digest.
#
# Invariant: a number stands for one digest for ever, so equal keys mean equal pictures. A number is forgotten when no request
# has it and _REMEMBERED others came since; the picture then gets another, and finds its pages by their hashes. Bound: names of
# the pictures of requests, and of _REMEMBERED more.

FIRST_NUMBER = 1 << 24
"""Numbers of pictures begin here; no vocabulary has so many tokens."""
_MOST_NUMBERS = 1 << 32
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PictureName:
    """What a number stands for: the digest of a picture, and the id of its tokens."""

    number: int
    digest: bytes
    token: int


class PictureNames:
    """The numbers of pictures."""

    def __init__(self) -> None:
        self._by_content: WeakValueDictionary[tuple[bytes, int], PictureName] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[int, PictureName] = WeakValueDictionary()
        self._recent: OrderedDict[int, PictureName] = OrderedDict()
        self._next = FIRST_NUMBER

    def name(self, digest: bytes, token: int) -> PictureName:
        """The name of a picture, which is remembered at least as long as the caller keeps it."""
        found = self._by_content.get((digest, token))
        if found is None:
            assert self._next < _MOST_NUMBERS, "four billion pictures: restart the worker"
            found = PictureName(self._next, digest, token)
            self._next += 1
            self._by_content[digest, token] = self._by_number[found.number] = found
        self._recent[found.number] = found
        self._recent.move_to_end(found.number)
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return found

    @staticmethod
    def among(tokens: bytes) -> bool:
        """Whether there are numbers of pictures among tokens (native uint32)."""
        return any(tokens[_TOP_BYTE::4])

    def content(self, page: bytes) -> bytes:
        """What a page is hashed as: its tokens (native uint32), and the digests of its pictures behind them. The pictures' names
        must be known."""
        if not self.among(page):
            return page
        ids = np.frombuffer(page, np.uint32).copy()
        digests = []
        for number in dict.fromkeys(ids[ids >= FIRST_NUMBER].tolist()):
            name = self._by_number[number]
            ids[ids == number] = name.token
            digests.append(name.digest)
        return ids.tobytes() + b"".join(digests)

    def plain(self, tokens: bytes) -> bytes:
        """Tokens with the ids of pictures' tokens in place of numbers; 0 for a picture that was forgotten."""
        if not self.among(tokens):
            return tokens
        ids = np.frombuffer(tokens, np.uint32).copy()
        for number in set(ids[ids >= FIRST_NUMBER].tolist()):
            name = self._by_number.get(number)
            ids[ids == number] = 0 if name is None else name.token
        return ids.tobytes()


_TOP_BYTE = 3 if sys.byteorder == "little" else 0


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
        names: Those of the pictures in the sequence; None: it has none.

    Attributes:
        pages: All pages so far.
    """

    def __init__(
        self,
        namespace: bytes,
        page_size: int,
        known: list[PageName] | None = None,
        names: PictureNames | None = None,
    ) -> None:
        self._page_size = page_size
        self._names = names
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
            before, content = parent, page if self._names is None else self._names.content(page)
            parent = PageKey(
                xxhash.xxh3_128_digest(parent.hash + content), hashlib.sha256(parent.proof + content).digest()
            )
            self.pages.append(PageName(parent, b"" if before is self._root else before.hash, page, self._lora))


# KV events in the order in which they happened.


class KvEventLog:
    """Events in the order they happened, until they are taken.

    Args:
        names: Those of the pictures in pages that events name; None: there are none.
    """

    def __init__(self, names: PictureNames | None = None) -> None:
        self._names = names
        self._events: list[KvEvent] = []

    def add(self, event: KvEvent) -> None:
        """Appends an event."""
        if self._names is not None and isinstance(event, BlockStored):
            plain = self._names.plain(event.token_ids)
            event = event if plain is event.token_ids else msgspec.structs.replace(event, token_ids=plain)
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
