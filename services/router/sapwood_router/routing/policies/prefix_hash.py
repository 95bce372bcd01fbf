"""The worker that a prompt's first tokens hash to, unless it has much more to do than the others.

Algorithm: consistent hashing with bounded loads (see ``index/ring.py``): the first worker along the ring that, with this
request, has at most LOAD_FACTOR times the mean. Needs no memory and no talk between routers: all choose alike.
In a large fleet it looks at the next NEAREST workers on the ring, and draws as many to know the mean.
Complexity: O(n) for the loads, at most 2 x NEAREST, O(log n) for the place.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from itertools import islice

from sapwood_router.routing.index.ring import HashRing
from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.shortlist import MANY, draw
from sapwood_router.routing.worker_view import WorkerView

PREFIX_TOKENS = 256
LOAD_FACTOR = 1.25
NEAREST = 16


class PrefixHash(Forgetful):
    """Prompts that share their first 256 tokens share a worker.

    Args:
        rng: Draws, in large fleets.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._ring = HashRing()
        self._rng = rng or random.Random()

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        self._ring.set(addresses)
        return [*islice(self._ring.walk(_key(prompt)), NEAREST), *draw(addresses, self._rng, NEAREST)]

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """Reasons: prefix, prefix_overflow."""
        requests = {view.address: view.requests for view in workers}
        self._ring.include(requests)
        limit = math.ceil(LOAD_FACTOR * (sum(requests.values()) + 1) / len(workers))
        walk = islice(self._ring.walk(_key(prompt)), NEAREST if len(self._ring) > MANY else None)
        for place, address in enumerate(each for each in walk if each in requests):
            if requests[address] + 1 <= limit:
                return Choice(address, "prefix" if place == 0 else "prefix_overflow")
        return Choice(min(workers, key=load_key).address, "prefix_overflow")


def _key(prompt: PromptPages) -> bytes:
    return array("I", prompt.token_ids[:PREFIX_TOKENS]).tobytes()
