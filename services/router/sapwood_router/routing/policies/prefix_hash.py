"""The worker that a prompt's first tokens hash to, unless it has much more to do than the others.

Algorithm: consistent hashing with bounded loads (see ``index/ring.py``): the first worker along the ring that, with this
request, has at most LOAD_FACTOR times the mean. Needs no memory and no talk between routers: all choose alike.
Complexity: O(n) for the loads, O(log n) for the place.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from sapwood_router.routing.index.ring import HashRing
from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages
from sapwood_router.routing.worker_view import WorkerView

PREFIX_TOKENS = 256
LOAD_FACTOR = 1.25


class PrefixHash(Forgetful):
    """Prompts that share their first 256 tokens share a worker."""

    def __init__(self) -> None:
        self._ring = HashRing()

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """Reasons: prefix, prefix_overflow."""
        self._ring.set([view.address for view in workers])
        requests = {view.address: view.requests for view in workers}
        limit = math.ceil(LOAD_FACTOR * (sum(requests.values()) + 1) / len(workers))
        key = array("I", prompt.token_ids[:PREFIX_TOKENS]).tobytes()
        for place, address in enumerate(self._ring.walk(key)):
            if requests[address] + 1 <= limit:
                return Choice(address, "prefix" if place == 0 else "prefix_overflow")
        raise AssertionError("not every worker can have more than the mean")
