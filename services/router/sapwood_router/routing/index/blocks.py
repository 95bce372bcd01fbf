"""Which worker's KV cache holds which page, exactly, as the workers' own events tell.

Algorithm: for each tier one dictionary from page hash to the set of workers that hold the page there, the set as the bits of
an integer. A page's hash covers everything before it (``sapwood_common.contract.page_hash``), so a prompt's overlap with *all*
workers is one walk along its hashes: the workers still on the prefix are the intersection of the sets so far, and pages that
the same workers hold in the same tiers are counted as one run. Where there is one tier, the places where workers leave the prefix
are found by halving, since each look at a page of ten million misses the processor's caches. That is exact, as a cache drops the
end of a prefix before its start: a worker that holds a page holds all before it, even if the index had no room for that.

Complexity: overlaps O(log pages) for each length that is found, with several tiers O(pages walked + runs x workers), and the walk
ends with the last of them; holders O(log pages) for each that is found; an event O(1) a page; forgetting a worker O(its pages).
Bound: ``byte_budget`` bytes, kept on insert, at ENTRY_BYTES an entry and HOLDING_BYTES a worker and page. A page that does not
fit is not taken, and counted: the index then knows of less than is there, never of more.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

ENTRY_BYTES = 200
"""An entry of a tier's dictionary: a 16-byte key (64 as allocated), its slot, and an integer for the set."""
HOLDING_BYTES = 100
"""A page in a worker's own set; the key is shared with the entry."""


class Tier(IntEnum):
    """Where a worker holds a page; a lower number is nearer."""

    GPU = 0
    HOST = 1
    REMOTE = 2


TIER_WEIGHTS = {Tier.GPU: 1.0, Tier.HOST: 0.8, Tier.REMOTE: 0.4}
"""What a page found there saves, as a share of computing it."""
_WEIGHTS = tuple(TIER_WEIGHTS[tier] for tier in Tier)

_MOST_ALIKE = 3
"""How many workers are named that hold equally much of a prompt; the other names are for workers that hold less."""


class BlockIndex:
    """The exact index. Mutable, not thread-safe.

    Args:
        byte_budget: Bound on its memory in bytes.

    Attributes:
        refused: Pages not taken for want of room, since the start.
    """

    def __init__(self, byte_budget: int) -> None:
        self._budget = byte_budget
        self._holders: tuple[dict[bytes, int], ...] = tuple({} for _ in Tier)
        self._held: dict[str, tuple[set[bytes], ...]] = {}
        self._bits: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        """The worker of each bit."""
        self._holdings = 0
        self.refused = 0

    @property
    def bytes_used(self) -> int:
        """Memory in use, in bytes, as estimated."""
        return sum(map(len, self._holders)) * ENTRY_BYTES + self._holdings * HOLDING_BYTES

    def knows(self, worker: str) -> bool:
        """Whether this worker's pages are known."""
        return worker in self._bits

    def pages(self, worker: str, tier: Tier) -> frozenset[bytes]:
        """The hashes that a worker holds in a tier; a copy."""
        held = self._held.get(worker)
        return frozenset(held[tier] if held is not None else ())

    def count(self, worker: str, tier: Tier) -> int:
        """How many pages a worker holds in a tier."""
        held = self._held.get(worker)
        return len(held[tier]) if held is not None else 0

    def where(self, page: bytes) -> list[tuple[str, Tier]]:
        """Who holds a page, and where."""
        found: list[tuple[str, Tier]] = []
        for tier in Tier:
            holding = self._holders[tier].get(page, 0)
            while holding:
                bit = holding & -holding
                holding ^= bit
                found.append((self._owners[bit], tier))
        return found

    def reset(self, worker: str, snapshot: Iterable[tuple[Tier, Sequence[bytes]]] = ()) -> None:
        """Replaces the worker's blocks by those of the snapshot."""
        self.remove(worker)
        self._held[worker] = tuple(set() for _ in Tier)
        taken = self._owners.keys()
        bit = next(bit for bit in (1 << i for i in range(len(taken) + 1)) if bit not in taken)
        self._bits[worker], self._owners[bit] = bit, worker
        for tier, hashes in snapshot:
            self.store(worker, tier, hashes)

    def remove(self, worker: str) -> None:
        """Forgets a worker."""
        for tier, held in enumerate(self._held.get(worker, ())):
            self.drop(worker, Tier(tier), tuple(held))
        self._held.pop(worker, None)
        self._owners.pop(self._bits.pop(worker, 0), None)

    def store(self, worker: str, tier: Tier, hashes: Iterable[bytes]) -> None:
        """The worker, which is known, holds these pages in a tier."""
        held, holders, bit = self._held[worker][tier], self._holders[tier], self._bits[worker]
        left = self._budget - self.bytes_used - ENTRY_BYTES - HOLDING_BYTES
        for page in hashes:
            if page in held:
                continue
            if left < 0:
                self.refused += 1
                continue
            held.add(page)
            others = holders.get(page)
            # The bit of the 1000th worker takes 160 bytes: one object serves all pages that this worker alone holds.
            holders[page] = bit if others is None else others | bit
            self._holdings += 1
            left -= HOLDING_BYTES + (ENTRY_BYTES if others is None else 0)

    def drop(self, worker: str, tier: Tier, hashes: Iterable[bytes]) -> None:
        """The worker holds these pages in that tier no more; pages it did not hold are passed over."""
        held, holders, bit = self._held[worker][tier], self._holders[tier], self._bits[worker]
        for page in hashes:
            if page not in held:
                continue
            held.discard(page)
            self._holdings -= 1
            left = holders[page] & ~bit
            if left:
                holders[page] = left
            else:
                del holders[page]

    def overlaps(
        self,
        hashes: Sequence[bytes],
        stores: Mapping[str, str] = MappingProxyType({}),
        among: Iterable[str] | None = None,
    ) -> dict[str, tuple[int, float]]:
        """What each known worker holds of a prompt.

        Args:
            hashes: The prompt's page hashes, first page first.
            stores: The store that a worker shares with others of the same store: what one of them holds there, all do.
            among: Asks about these workers only; None: about all.

        Returns:
            For each worker that holds the first page: how many pages it holds from the start without a gap, in whichever tier
            (with one tier: up to the last one found by halving), and the sum of their weights, each page's best.
        """
        _, host, remote = self._holders
        bits = self._bits
        alive = -1
        if among is not None:
            alive = 0
            for worker in among:
                alive |= bits.get(worker, 0)
        if not (host or remote):
            return self._lengths(hashes, alive)
        shared: dict[str, int] = {}
        for worker, store in stores.items():
            shared[store] = shared.get(store, 0) | bits.get(worker, 0)
        return self._weighed(hashes, alive, shared.values())

    def _lengths(self, hashes: Sequence[bytes], alive: int) -> dict[str, tuple[int, float]]:
        """What :meth:`overlaps` finds, where all pages are in the nearest tier."""
        holders, owners = self._holders[Tier.GPU], self._owners
        found: dict[str, tuple[int, float]] = {}
        alive &= holders.get(hashes[0], 0) if hashes else 0
        depth = len(hashes)
        while alive:
            low, holding = 1, alive  # of those left, the deepest page that one holds, and who does
            while low < depth:
                middle = (low + depth + 1) // 2
                here = holders.get(hashes[middle - 1], 0) & alive
                if here:
                    low, holding = middle, here
                else:
                    depth = middle - 1
            alive ^= holding
            counted = low, float(low)
            while holding:
                bit = holding & -holding
                holding ^= bit
                found[owners[bit]] = counted
            depth = low - 1
        return found

    def _weighed(self, hashes: Sequence[bytes], alive: int, stores: Collection[int]) -> dict[str, tuple[int, float]]:
        """What :meth:`overlaps` finds, where pages are in several tiers."""
        gpu, host, remote = self._holders
        found: dict[int, tuple[int, float]] = {}
        raw = run = (0, 0, 0)
        length = 0
        for page in hashes:
            sets = gpu.get(page, 0), host.get(page, 0), remote.get(page, 0)
            if sets != raw:
                self._count(found, alive, run, length)
                raw, run, length = sets, (sets[0], sets[1], _shared(sets[2], stores)), 0
                alive &= run[0] | run[1] | run[2]
            if run == (0, 0, 0) or not alive:
                break
            length += 1
        self._count(found, alive, run, length)
        return {self._owners[bit]: counted for bit, counted in found.items()}

    def holders(self, hashes: Sequence[bytes], most: int, rng: random.Random) -> dict[str, int]:
        """Some of the workers that hold the longest prefixes of a prompt, in any tier, and how many pages: of those that hold
        equally much, a few at random.

        Args:
            hashes: The prompt's page hashes.
            most: How many workers, at most.
            rng: Draws.
        """
        found: dict[str, int] = {}
        seen, depth = 0, len(hashes)
        while depth and len(found) < most:
            depth, holding = self._deepest(hashes, depth, ~seen)
            seen |= holding
            for _ in range(min(_MOST_ALIKE, most - len(found))):
                if not holding:
                    break
                skipped = int(rng.random() * holding.bit_length())  # the top bit is always left
                rest = holding >> skipped
                bit = (rest & -rest) << skipped
                holding ^= bit
                found[self._owners[bit]] = depth
        return found

    def _deepest(self, hashes: Sequence[bytes], depth: int, wanted: int) -> tuple[int, int]:
        """The longest prefix of at most ``depth`` pages whose last page one of some workers holds, and which of them do."""
        gpu, host, remote = self._holders
        low, holding, tiered = 0, 0, bool(host or remote)
        while low < depth:
            middle = (low + depth + 1) // 2
            page = hashes[middle - 1]
            here = gpu.get(page, 0)
            if tiered:
                here |= host.get(page, 0) | remote.get(page, 0)
            here &= wanted
            if here:
                low, holding = middle, here
            else:
                depth = middle - 1
        return low, holding

    def _count(self, found: dict[int, tuple[int, float]], alive: int, run: tuple[int, int, int], length: int) -> None:
        """Adds a run of pages to the workers that are still on the prefix."""
        holding = alive & (run[0] | run[1] | run[2])
        while holding and length:
            bit = holding & -holding
            holding ^= bit
            tier = 0 if run[0] & bit else 1 if run[1] & bit else 2
            pages, weight = found.get(bit, (0, 0.0))
            found[bit] = (pages + length, weight + length * _WEIGHTS[tier])


def _shared(holders: int, groups: Collection[int]) -> int:
    """A set of workers, and all that share a store with one of them."""
    for group in groups:
        if holders & group:
            holders |= group
    return holders
