"""Which workers have which adapter (LoRA): as many as its requests need, and no more on a worker than the worker has slots.

Algorithm. Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998): an adapter
prefers workers in the order of the hashes of adapter and worker. Its first k workers with a free place hold it, so all routers
name about the same ones, and a worker that comes or goes moves only its own adapters. k grows with the adapter's share of all
requests: it is ``HEADROOM`` times the workers that would be busy with it, and one more. Its requests choose freely among the k,
so large adapters fill the room that small ones leave. k shrinks only when two workers are too many.

A place is a device slot: a worker gets no more adapters than it has slots. If no worker has a free place, an adapter without any
takes one on the worker that it prefers, from the adapter there with the fewest requests.

Complexity: O(1) a request while nothing changes; O(workers) where k grows, O(adapters) where a worker comes or goes.
Bound: O(adapters asked for in the last ``FORGET`` seconds) of memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import xxhash

HEADROOM = 2.0
FEWEST = 2
"""Holders of an adapter with few requests, as long as there are places for all."""
_FULL = 0.8
"""The share of all places up to which adapters with few requests have that many."""
HALF_LIFE = 60.0
"""Seconds after which a request counts half."""
FORGET = 900.0
"""Seconds without a request after which an adapter has no place any more."""
_PRIOR = 16
"""So many requests a worker count as those of other adapters: a few requests say nothing of shares."""


class _Demand:
    """An adapter's requests lately."""

    __slots__ = ("at", "count")

    def __init__(self) -> None:
        self.at = self.count = 0.0

    def add(self, now: float) -> float:
        self.count = self.now(now) + 1.0
        self.at = now
        return self.count

    def now(self, now: float) -> float:
        return self.count * math.exp2((self.at - now) / HALF_LIFE)


class LoraPlacement:
    """The places of one model's adapters. Not thread-safe.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: Mapping[str, int] = {}
        self._held: dict[str, list[str]] = {}
        self._used: Counter[str] = Counter()
        self._demands: dict[str, _Demand] = {}
        self._all = _Demand()

    def asked(self, name: str) -> None:
        """There is a request for an adapter."""
        now = self._clock()
        demand = self._demands.get(name)
        if demand is None:
            demand = self._demands[name] = _Demand()
        demand.add(now)
        self._all.add(now)

    def per_minute(self, name: str) -> float:
        """About how many requests a minute an adapter has had lately."""
        demand = self._demands.get(name)
        return 0.0 if demand is None else demand.now(self._clock()) * math.log(2) * 60.0 / HALF_LIFE

    def names(self) -> list[str]:
        """The adapters that have places."""
        return list(self._held)

    def holders(self, name: str, workers: Mapping[str, int]) -> list[str]:
        """The workers that an adapter's requests go to, the preferred one first; at least one unless there are none with slots.

        Args:
            name: The adapter.
            workers: All workers that could have it, and their slots; the same object until something changes.
        """
        if workers is not self._workers:
            self._set(workers)
        held = self._held.get(name)
        wanted = self._wanted(name)
        if held is None:
            held = self._held[name] = []
        if len(held) < wanted:
            self._grow(name, held, wanted)
        elif len(held) > wanted + 1:
            for address in held[wanted:]:
                self._used[address] -= 1
            del held[wanted:]
        return held

    def places(self, name: str) -> list[str]:
        """What :meth:`holders` named last; empty: nothing, or it was forgotten."""
        return list(self._held.get(name, ()))

    def forget(self, name: str) -> None:
        """The adapter is unloaded: its places are free."""
        for address in self._held.pop(name, ()):
            self._used[address] -= 1
        self._demands.pop(name, None)

    def lapse(self) -> None:
        """Takes the places of adapters that nobody asks for. To be called now and then."""
        now = self._clock()
        for name in [name for name, demand in self._demands.items() if now - demand.at > FORGET]:
            self.forget(name)

    def check(self) -> None:
        """Checks the account of places; for tests. Raises AssertionError."""
        used = Counter(address for held in self._held.values() for address in held)
        assert used == Counter({address: count for address, count in self._used.items() if count})
        for name, held in self._held.items():
            assert len(set(held)) == len(held), f"{name} has a worker twice"
        assert all(count <= self._workers.get(address, 0) for address, count in used.items()), "more than its slots"

    def _wanted(self, name: str) -> int:
        demand = self._demands.get(name)
        now, count = self._clock(), len(self._workers)
        if demand is None or not count:
            return min(1, count)
        share = demand.now(now) / (self._all.now(now) + _PRIOR * count)
        fewest = FEWEST if FEWEST * len(self._demands) <= _FULL * sum(self._workers.values()) else 1
        return min(count, max(fewest, math.ceil(share * count * HEADROOM) + fewest - 1))

    def _set(self, workers: Mapping[str, int]) -> None:
        """These are the workers now. Those that are still there keep what they have."""
        self._workers = workers
        self._used.clear()
        for name, held in self._held.items():
            held[:] = [address for address in held if self._used[address] < workers.get(address, 0)]
            # What comes first in the order of preference is kept in that order.
            held.sort(key=lambda address: _weight(name, address), reverse=True)
            self._used.update(held)

    def _grow(self, name: str, held: list[str], wanted: int) -> None:
        order = sorted(self._workers, key=lambda address: _weight(name, address), reverse=True)
        for address in order:
            if len(held) >= wanted:
                break
            if address not in held and self._used[address] < self._workers[address]:
                held.append(address)
                self._used[address] += 1
        held.sort(key=lambda address: _weight(name, address), reverse=True)
        if not held and order:
            self._take_place(name, held, order)

    def _take_place(self, name: str, held: list[str], order: list[str]) -> None:
        """All places are taken: takes one from the adapter with the fewest requests at the worker that this one prefers."""
        now = self._clock()
        for address in order:
            there = [other for other, at in self._held.items() if address in at]
            if there:
                fewest = min(there, key=lambda other: self._demands[other].now(now) if other in self._demands else 0.0)
                self._held[fewest].remove(address)
                held.append(address)
                return


def _weight(name: str, address: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{name}\n{address}".encode())
