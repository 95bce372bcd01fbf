"""The worker with the least to do."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.worker_view import WorkerView


class LeastLoad(Forgetful):
    """The worker with the fewest requests; see :func:`~sapwood_router.routing.policies.base.load_key` for ties. O(workers)."""

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        return Choice(min(workers, key=load_key).address, "least_load")
