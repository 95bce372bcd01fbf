"""The better of two random workers.

Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001): with d = 2 the most loaded of n workers has
O(log log n) more than the mean, against O(log n / log log n) for one random choice; and routers that share nothing do not
all rush to the same worker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.shortlist import draw
from sapwood_router.routing.worker_view import WorkerView


class PowerOfTwo(Forgetful):
    """Draws two workers and takes the one whose requests hold less of its cache; at about the same share, the less loaded. O(1).

    Args:
        rng: Source of randomness.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        return draw(addresses, self._rng)

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        if len(workers) == 1:
            return Choice(workers[0].address, "only_worker")
        pair = self._rng.sample(workers, 2)
        chosen = min(pair, key=lambda view: (round(view.used_share / 0.05), load_key(view)))
        return Choice(chosen.address, "power_of_two")
