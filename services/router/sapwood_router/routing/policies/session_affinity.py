"""The worker that answered a session last; a new session goes to the worker with the least to do.

Memory: the latest 65 536 sessions, some 200 bytes each. O(1) for a known session, O(workers) for a new one.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.shortlist import DRAWS, draw
from sapwood_router.routing.worker_view import WorkerView

_MOST_SESSIONS = 65_536
_CROWDED_SHARE, _CROWDED_REQUESTS = 2.0, 8
"""A session leaves its worker where that has this many times the mean of requests, and so many more."""


class SessionAffinity(Forgetful):
    """Unlike ``consistent_hash``, it looks at loads when a session begins, and moves a session whose worker is crowded or gone.

    Args:
        rng: Draws, in large fleets.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._homes: OrderedDict[str, str] = OrderedDict()

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        drawn = draw(addresses, self._rng, 4 * DRAWS)
        home = self._homes.get(prompt.session) if prompt.session else None
        return drawn if home is None or home in drawn or home not in addresses else [home, *drawn]

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """Reasons: session, session_moved, session_begun, no_session."""
        least = min(workers, key=load_key)
        if not prompt.session:
            return Choice(least.address, "no_session")
        known = self._homes.get(prompt.session)
        home = next((view for view in workers if view.address == known), None)
        limit = sum(view.requests for view in workers) / len(workers) * _CROWDED_SHARE + _CROWDED_REQUESTS
        if home is not None and home.requests <= limit:
            return Choice(home.address, "session")
        return Choice(least.address, "session_begun" if known is None else "session_moved")

    def placed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """The session's next request goes there, too."""
        if prompt.session:
            self._homes[prompt.session] = address
            self._homes.move_to_end(prompt.session)
            if len(self._homes) > _MOST_SESSIONS:
                self._homes.popitem(last=False)
