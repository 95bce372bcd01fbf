"""When a drafter that takes time is tried though its drafts were wrong: what it would have said is known only if it is asked."""

from __future__ import annotations

from sapwood_worker.core.scheduler.request_drafts import learned

_FIRST_RATE = 0.7
_WEIGHT = 0.1
_SOON, _LATE = 32, 2048
"""Steps without drafts after which one is tried: the first time, and at the latest; each in vain doubles them."""


class Trials:
    """Counts steps. Constructed, it trusts the drafter.

    Attributes:
        rate: How often any request's drafted token was right of late: what a new request begins with.
        turn: Grows from trial to trial.
    """

    def __init__(self) -> None:
        self.rate = _FIRST_RATE
        self.turn = 0
        self._patience = _SOON
        self._steps = 0

    def due(self) -> bool:
        """Whether a step that may draft is one to try; called for each such step."""
        self._steps += 1
        return self._steps > self._patience

    def began(self) -> None:
        """A trial is made; it is in vain unless :meth:`drafted` says otherwise."""
        self.turn += 1
        self._steps = 0
        self._patience = min(2 * self._patience, _LATE)

    def drafted(self, right: int, *, wrong: bool) -> None:
        """A draft was checked: how many tokens were right before one, if any, was not."""
        self._steps = 0
        self.rate = learned(self.rate, right, int(wrong), _WEIGHT)
        if right:
            self._patience = _SOON
