"""Token ids of texts and of parts of texts, kept for the next time, within a budget of bytes.

Two levels: L0 knows whole texts (``Encoder`` asks it before anything else). L1 knows the parts between safe boundaries
(``safe_boundary``), so of a conversation that has grown by a turn only the new turn is encoded. A part's ids do not depend on
the text before it, so its key is its own text. So every prefix of a text that was encoded before is found, and so are parts
behind one that has changed; a text shared by many conversations is kept once. Keys are the texts themselves, compared in full:
no hash is trusted, so no client can make another get wrong ids. A key includes a salt: otherwise one tenant could tell by the
time taken what another has sent.

Algorithm: LRU eviction. O(length of the key) to hash it, O(1) otherwise. Bound: the budget in bytes, counting keys, ids and
table.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_ENTRY_BYTES = 360
"""Bytes of an entry besides the text and the ids: dictionary slot and links, key tuple, array object."""

_LARGEST_SHARE = 8
"""An entry larger than this fraction (one eighth) of the budget is not kept: it would evict too much else."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A cache's hits, misses and evictions since the start, and its size."""

    hits: int
    misses: int
    evictions: int
    tokens_reused: int
    entries: int
    bytes: int
    capacity_bytes: int


class EncodeCache(Generic[K]):
    """Remembers token ids, least recently used ones go first. Thread-safe.

    Args:
        capacity: The budget in bytes; 0 keeps nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[array[int], int]] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._tokens_reused = 0

    @property
    def enabled(self) -> bool:
        """Whether it ever keeps anything."""
        return self._capacity > 0

    def get(self, key: K) -> array[int] | None:
        """The ids kept for a key, which the caller must not change; None if there are none."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._misses += 1
                return None
            self._entries.move_to_end(key)
            self._hits += 1
            self._tokens_reused += len(found[0])
            return found[0]

    def put(self, key: K, text: str, ids: array[int]) -> None:
        """Keeps ids; no code may change them any more.

        Args:
            key: Holds ``text`` and possibly more.
            text: The text, whose size counts.
            ids: The token ids.
        """
        size = _ENTRY_BYTES + sys.getsizeof(text) + len(ids) * ids.itemsize
        if size > self._capacity // _LARGEST_SHARE:
            return
        with self._lock:
            if key in self._entries:
                return  # another thread encoded the same text
            self._entries[key] = (ids, size)
            self._bytes += size
            while self._bytes > self._capacity:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed
                self._evictions += 1

    def stats(self) -> CacheStats:
        """Counters and size."""
        with self._lock:
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                tokens_reused=self._tokens_reused,
                entries=len(self._entries),
                bytes=self._bytes,
                capacity_bytes=self._capacity,
            )
