"""Each worker in turn."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages
from sapwood_router.routing.worker_view import WorkerView


class RoundRobin(Forgetful):
    """Each worker in turn, without a look at its load. O(1)."""

    def __init__(self) -> None:
        self._next = 0

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        return (addresses[self._next % len(addresses)],)

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        chosen = workers[self._next % len(workers)]
        self._next += 1
        return Choice(chosen.address, "round_robin")
