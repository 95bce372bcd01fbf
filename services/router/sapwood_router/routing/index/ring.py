"""Consistent hashing: a key's place among workers hardly changes as workers come and go.

Algorithm: Karger et al., "Consistent Hashing and Random Trees" (1997): each worker has POINTS points on a ring of 64-bit
hashes; a key belongs to the worker of the first point at or after its own hash. A worker that comes to n others
or leaves them moves about 1/n of the keys. With bounded load (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with
Bounded Loads", 2017) a key continues along the ring past workers that have more than a factor of the mean load.

Complexity: O(log(n x POINTS)) for a key's worker, O(n x POINTS log) after a change of workers. Bound: 2 ints a point.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence

import xxhash

POINTS = 128
"""Points a worker: shares of the keys then differ from 1/n by about 1/sqrt(128), 9 %."""


class HashRing:
    """A ring over addresses; made again when they change. Not thread-safe."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self._given: tuple[str, ...] | None = None
        self._known: frozenset[str] = frozenset()
        self._hashes: list[int] = []
        self._owners: list[str] = []

    def __len__(self) -> int:
        return len(self._addresses)

    def include(self, addresses: Collection[str]) -> None:
        """These are among the workers. Others that were stay: a key's worker is the same whether they are skipped or gone."""
        if not self._known.issuperset(addresses):
            self.set(tuple(addresses))

    def set(self, addresses: Sequence[str]) -> None:
        """These are the workers now; their order does not matter. Quick if nothing changed."""
        if addresses is self._given:
            return
        self._given = addresses if isinstance(addresses, tuple) else None
        wanted = tuple(sorted(addresses))
        if wanted == self._addresses:
            return
        self._known = frozenset(wanted)
        self._addresses = wanted
        points = sorted(
            (xxhash.xxh3_64_intdigest(f"{address}#{number}".encode()), address)
            for address in wanted
            for number in range(POINTS)
        )
        self._hashes = [point for point, _ in points]
        self._owners = [owner for _, owner in points]

    def walk(self, key: bytes) -> Iterator[str]:
        """All workers, each once, in the order in which the key prefers them."""
        start = bisect.bisect_left(self._hashes, xxhash.xxh3_64_intdigest(key))
        seen: set[str] = set()
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self._addresses):
                    return
