"""When a drafter that takes time is tried though its drafts were wrong: what it would have said is known only if it is asked."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.request_drafts import RequestDrafts, learned

_FIRST_RATE = 0.7
_WEIGHT, _SURE = 0.05, 3
"""How much one draft changes the rate, and as how many of them the first rate counts."""
_HOPE = 0.15
"""Rate below which trials of a request become rarer."""
_SOON, _LATE = 32, 2048
"""Steps without drafts, and tokens of a request, after which one is tried: at first, and at the latest; each in vain doubles the
steps, and the tokens where there is little hope."""


class Trials:
    """Counts steps. Constructed, it trusts the drafter.

    Attributes:
        rate: How often any request's drafted token was right of late: what a new request begins with.
    """

    def __init__(self) -> None:
        self.rate = _FIRST_RATE
        self._turn = 0
        self._known = 0
        self._patience = _SOON
        self._steps = 0

    def due(self) -> bool:
        """Whether a step that may draft is one to try; called for each such step."""
        self._steps += 1
        return self._steps > self._patience

    def choose(self, requests: Sequence[Request]) -> Request | None:
        """The request to try: those in turn that were not tried in vain a short while ago. O(requests)."""
        count = len(requests)
        for each in (requests[(self._turn + place) % count] for place in range(count)):
            if each.drafts is None or len(each.token_ids) >= each.drafts.tried_again:
                return each
        return None

    def began(self, request: Request) -> None:
        """A request is tried; it is in vain unless :meth:`drafted` says otherwise."""
        self._turn += 1
        self._steps = 0
        self._patience = min(2 * self._patience, _LATE)
        if (drafts := request.drafts) is not None:
            drafts.patience = min(2 * drafts.patience, _LATE) if drafts.rate < _HOPE else 0
            drafts.patience = drafts.patience or _SOON
            drafts.tried_again = len(request.token_ids) + drafts.patience

    def drafted(self, drafts: RequestDrafts, right: int, *, wrong: bool) -> None:
        """A request's draft was checked: how many tokens were right before one, if any, was not."""
        self._steps = 0
        self.rate = learned(self.rate, right, int(wrong), max(_WEIGHT, 1 / (_SURE + 1 + self._known)))
        self._known += right + wrong
        if right:
            self._patience = _SOON
            drafts.patience = drafts.tried_again = 0
