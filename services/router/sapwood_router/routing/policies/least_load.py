"""The worker with the least to do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.shortlist import DRAWS, draw
from sapwood_router.routing.worker_view import WorkerView


class LeastLoad(Forgetful):
    """The worker with the fewest requests; see :func:`~sapwood_router.routing.policies.base.load_key` for ties.

    O(workers); of a large fleet the least loaded of some drawn ones, O(1).

    Args:
        rng: Draws.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        return draw(addresses, self._rng, 4 * DRAWS)

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        return Choice(min(workers, key=load_key).address, "least_load")
