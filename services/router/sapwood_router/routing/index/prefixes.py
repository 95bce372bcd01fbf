"""Which worker's KV cache holds which prefix, as far as the router can tell from its own placements.

Algorithm: a prompt is the chain of its page hashes; each hash covers everything before it
    (``sapwood_common.contract.page_hash``), so
no tree is needed: a prefix is held if its last hash is. Each worker has one LRU list of hashes, never longer than the worker
has pages. A chain is touched from its end to its start, so an ancestor is always younger than its descendants and eviction,
oldest first, takes leaves first: what is left of a chain is always a prefix of it. The longest held prefix is therefore
found by binary search.

Complexity: overlap O(log n) hash lookups, insert O(n), for a prompt of n pages. Over the byte budget, the entry least
recently touched over all workers goes: O(log workers) each, by a heap of when each worker's oldest entry was touched at the
earliest.

Bound: ``byte_budget`` bytes over all workers, kept on insert, at ENTRY_BYTES an entry.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MOST_CHAINS = 64
MOST_PAGES = 256
SPREAD = 1.25
HANDED_SECONDS = 60.0
"""How long what was handed over counts: a conversation that continues later begins again wherever there is room."""
_HANDED_BYTES = 16 * 1024 * 1024


class HotPrefixes:
    """Mutable, not thread-safe.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._chains: dict[str, OrderedDict[bytes, list[bytes]]] = {}
        self._handed = PrefixIndex(_HANDED_BYTES, clock)

    def asked(self, worker: str, hashes: Sequence[bytes]) -> None:
        """The worker was given a prompt with these page hashes."""
        if not hashes:
            return
        chains = self._chains.setdefault(worker, OrderedDict())
        chain = list(hashes[:MOST_PAGES])
        chains[chain[-1]] = chain
        chains.move_to_end(chain[-1])
        if len(chains) > MOST_CHAINS:
            chains.popitem(last=False)

    def latest(self, most: int) -> list[tuple[str, Sequence[bytes]]]:
        """The latest prompts and the workers they were given to, each worker's latest first; ``most`` of each worker."""
        return [
            (worker, chain)
            for worker, chains in self._chains.items()
            for _, chain in zip(range(most), reversed(chains.values()), strict=False)
        ]

    def forget(self, worker: str) -> None:
        """The worker is gone, or began again: nothing of it is left to hand over, or was handed to it."""
        self._chains.pop(worker, None)
        self._handed.reset(worker, MOST_CHAINS * MOST_PAGES)

    def hand_over(self, worker: str, heirs: Sequence[str]) -> None:
        """Gives the worker's recent prefixes to other workers; without heirs, drops them. It has nothing to hand over then."""
        chains = self._chains.pop(worker, None)
        if not chains or not heirs:
            return
        most = math.ceil(SPREAD * len(chains) / len(heirs))
        got = dict.fromkeys(heirs, 0)
        for chain in reversed(chains.values()):
            open_heirs = [heir for heir in heirs if got[heir] < most]
            heir = max(open_heirs, key=lambda name: (self._handed.overlap(name, chain), -got[name]))
            self._handed.insert(heir, chain)
            got[heir] += 1

    @property
    def handing(self) -> bool:
        """Whether anything was handed over lately to anybody."""
        return self._handed.bytes_used > 0

    def handed(self, worker: str, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's pages were lately handed to a worker, which need not hold them yet."""
        return self._handed.overlap(worker, hashes, HANDED_SECONDS)


ENTRY_BYTES = 200
"""What an entry costs CPython at most: a 16-byte key (64 as allocated), its node and its slots in an OrderedDict. Measured
at 164 on average; more just after the table grew."""
_NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Insertion:
    """What an insertion did: ``new`` of the pages, the last ones, were not there before; ``at`` is when, on the index's clock."""

    new: int
    at: float


class PrefixIndex:
    """The approximate index. Mutable, not thread-safe.

    Args:
        byte_budget: Bound on its memory in bytes.
        clock: Seconds, monotonic.
    """

    def __init__(self, byte_budget: int, clock: Callable[[], float]) -> None:
        self._most_entries = byte_budget // ENTRY_BYTES
        self._clock = clock
        self._held: dict[str, OrderedDict[bytes, float]] = {}
        self._capacity: dict[str, int] = {}
        self._entries = 0
        self._oldest: list[tuple[float, str]] = []
        """A heap: each worker with entries, and a time at or before which its oldest was touched."""
        self._queued: set[str] = set()
        """The workers in it."""

    @property
    def bytes_used(self) -> int:
        """Memory in use, in bytes, at ENTRY_BYTES an entry."""
        return self._entries * ENTRY_BYTES

    def entries(self, worker: str) -> int:
        """How many pages a worker is believed to hold."""
        return len(self._held.get(worker, ()))

    def reset(self, worker: str, capacity: int) -> None:
        """Forgets what a worker holds; from now on it is believed to hold at most ``capacity`` pages."""
        self._entries -= len(self._held.pop(worker, ()))
        self._capacity[worker] = capacity

    def overlap(self, worker: str, hashes: Sequence[bytes], within: float = math.inf) -> int:
        """How many of a prompt's pages, from its start, a worker is believed to hold since it used them last.

        Args:
            worker: Its address.
            hashes: The prompt's page hashes.
            within: Only pages used in this many seconds before now count.
        """
        return self.beyond({worker: 0}, hashes, within).get(worker, 0)

    def beyond(self, known: Mapping[str, int], hashes: Sequence[bytes], within: float) -> dict[str, int]:
        """The same for those of some workers that are believed to hold more than is known of them.

        Args:
            known: The known pages of each worker: one look at the next page shows whether there are more.
            hashes: The prompt's page hashes.
            within: Only pages used in this many seconds before now count.
        """
        found: dict[str, int] = {}
        since, most, all_held = self._clock() - within, len(hashes), self._held
        for worker, pages in known.items():
            held = all_held.get(worker)
            if not held or pages >= most or held.get(hashes[pages], _NEVER) <= since:  # later pages were used no later
                continue
            low, high = pages + 1, most
            while low < high:
                middle = (low + high + 1) // 2
                if held.get(hashes[middle - 1], _NEVER) > since:
                    low = middle
                else:
                    high = middle - 1
            found[worker] = low
        return found

    def insert(self, worker: str, hashes: Sequence[bytes]) -> Insertion:
        """A worker holds these pages from now on, and used them last; returns what :meth:`take_back` needs."""
        held = self._held.setdefault(worker, OrderedDict())
        before = len(held)
        now = self._clock()
        for page in reversed(hashes):
            held[page] = now
            held.move_to_end(page)
        new = len(held) - before
        capacity = self._capacity.get(worker)
        if capacity is not None:
            for _ in range(len(held) - capacity):
                held.popitem(last=False)
        self._entries += len(held) - before
        if held and worker not in self._queued:
            self._queued.add(worker)
            heapq.heappush(self._oldest, (next(iter(held.values())), worker))
        while self._entries > self._most_entries:
            self._evict_oldest()
        return Insertion(new, now)

    def take_back(self, worker: str, hashes: Sequence[bytes], insertion: Insertion) -> None:
        """Forgets those pages that an insertion added and that nothing has used since."""
        held = self._held.get(worker)
        if held is None:
            return
        for page in reversed(hashes[len(hashes) - insertion.new :]):
            used = held.get(page, insertion.at)
            if used != insertion.at:
                break  # and so was what is before it
            if held.pop(page, None) is not None:  # or it had to make room
                self._entries -= 1

    def _evict_oldest(self) -> None:
        while True:
            at, worker = self._oldest[0]
            held = self._held.get(worker)
            if not held:
                heapq.heappop(self._oldest)
                self._queued.discard(worker)
                continue
            since = next(iter(held.values()))
            if since == at:
                held.popitem(last=False)
                self._entries -= 1
                return
            heapq.heapreplace(self._oldest, (since, worker))
