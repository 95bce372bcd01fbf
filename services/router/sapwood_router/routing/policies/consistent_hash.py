"""One worker for all requests of a session, whatever their prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from sapwood_router.routing.index.ring import HashRing
from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.shortlist import DRAWS, draw
from sapwood_router.routing.worker_view import WorkerView

_NEXT = 4


class ConsistentHash(Forgetful):
    """The session's worker on a ``HashRing``; without a session the least loaded. O(log n).

    Loads are not looked at: a session that asks too much of its worker waits there.

    Args:
        rng: Draws, in large fleets.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._ring = HashRing()
        self._rng = rng or random.Random()

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        """Besides its own worker, the next ones on the ring, which stand in for a worker that cannot be asked."""
        if not prompt.session:
            return draw(addresses, self._rng, 4 * DRAWS)
        self._ring.set(addresses)
        return list(islice(self._ring.walk(prompt.session.encode()), _NEXT))

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """Reasons: session, no_session."""
        if not prompt.session:
            return Choice(min(workers, key=load_key).address, "no_session")
        there = {view.address for view in workers}
        self._ring.include(there)
        key = prompt.session.encode()
        return Choice(next(address for address in self._ring.walk(key) if address in there), "session")
