"""One worker for all requests of a session, whatever their prompts."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_router.routing.index.ring import HashRing
from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.worker_view import WorkerView


class ConsistentHash(Forgetful):
    """The session's worker on a ``HashRing``; without a session the least loaded. O(log n).

    Loads are not looked at: a session that asks too much of its worker waits there.
    """

    def __init__(self) -> None:
        self._ring = HashRing()

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """Reasons: session, no_session."""
        if not prompt.session:
            return Choice(min(workers, key=load_key).address, "no_session")
        self._ring.set([view.address for view in workers])
        return Choice(next(self._ring.walk(prompt.session.encode())), "session")
