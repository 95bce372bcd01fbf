"""Adapters (LoRA) on a fleet under a virtual clock: loads a request, and how evenly workers are used, for three ways to choose.

placed  the least loaded of the holders that the router's own ``LoraPlacement`` names
loaded  the least loaded of the workers that have the adapter; if none has it, of all
least   the least loaded worker

A worker's slots are an LRU cache; a miss is a load. Requests take exponential times.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass

from sapwood_router.routing.lora_placement import LoraPlacement

WAYS = ("placed", "loaded", "least")


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters asked for by Zipf's law, workers with slots, requests a second, and a request's mean seconds."""

    adapters: int = 500
    workers: int = 50
    slots: int = 32
    rate: float = 500.0
    seconds: float = 2.0
    exponent: float = 1.0


def simulate(what: Adapters, way: str, requests: int, warm: int, seed: int = 1) -> dict[str, float | str]:
    """Figures of ``requests`` requests after ``warm`` others.

    Args:
        what: The fleet.
        way: How a worker is chosen, of WAYS.
        requests: That count.
        warm: Requests before those.
        seed: Of arrivals.
    """
    rng = random.Random(seed)
    now = 0.0
    addresses = [f"10.0.0.{number}:1" for number in range(what.workers)]
    places = LoraPlacement(lambda: now)
    slots = dict.fromkeys(addresses, what.slots)
    cached: dict[str, OrderedDict[int, None]] = {address: OrderedDict() for address in addresses}
    running = dict.fromkeys(addresses, 0)
    ends: list[tuple[float, str]] = []
    weights, total = [], 0.0
    for rank in range(what.adapters):
        total += 1 / (rank + 1) ** what.exponent
        weights.append(total)
    served: Counter[str] = Counter()
    loads = most = 0
    for number in range(warm + requests):
        now += rng.expovariate(what.rate)
        while ends and ends[0][0] <= now:
            running[heapq.heappop(ends)[1]] -= 1
        adapter = rng.choices(range(what.adapters), cum_weights=weights)[0]
        if way == "placed":
            places.asked(str(adapter))
            candidates = places.holders(str(adapter), slots)
        elif way == "loaded":
            candidates = [address for address in addresses if adapter in cached[address]] or addresses
        else:
            candidates = addresses
        fewest = min(running[address] for address in candidates)
        address = rng.choice([each for each in candidates if running[each] == fewest])
        held = cached[address]
        counts = number >= warm
        if adapter in held:
            held.move_to_end(adapter)
        else:
            loads += counts
            held[adapter] = None
            if len(held) > what.slots:
                held.popitem(last=False)
        running[address] += 1
        heapq.heappush(ends, (now + rng.expovariate(1 / what.seconds), address))
        served[address] += counts
        most = max(most, running[address]) if counts else most
    places.check()
    return {
        "way": way,
        "loads_a_request": round(loads / requests, 4),
        "imbalance": round(max(served[each] for each in addresses) * what.workers / requests, 3),
        "most_running": most,
        "mean_running": round(what.rate * what.seconds / what.workers, 1),
    }
