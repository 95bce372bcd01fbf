"""Any worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages
from sapwood_router.routing.shortlist import draw
from sapwood_router.routing.worker_view import WorkerView


class Random(Forgetful):
    """Each worker equally likely. O(1).

    Args:
        rng: Source of randomness.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        return draw(addresses, self._rng)

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        return Choice(self._rng.choice(workers).address, "random")
