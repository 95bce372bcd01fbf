"""Fills the token budget that a step's decodes leave with chunks of prompts.

It starts requests and gives them tokens; ``scheduler/admission.py`` says whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.retraction import NewTokenRatio
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch

WORTH_WAITING = 32
"""A request waits while another computes a prefix that both share, if the prefix has at least so many tokens (SGLang's value)."""
_SCORED = 4
"""How many tokens of the budget a prompt token counts as whose log probabilities are wanted, because the whole vocabulary is
computed for it. Without this, a step of 400 such tokens took 20 s on two busy cores, and all other requests waited. Such a prompt
gets at most half of the budget that is left, so that the next request can begin beside it.
"""


class PrefillAdder:
    """One step's prefill.

    Args:
        running: The running requests; admitted ones join them.
        budget: Tokens this step may prefill.
        ratio: How much of their ``max_tokens`` requests will generate; pages for that stay in reserve.
        computing: The chunks that steps in flight compute, in the form of ``chunks``.

    Attributes:
        budget: Tokens that are left.
    """

    def __init__(
        self,
        running: RunningBatch,
        budget: int,
        ratio: NewTokenRatio,
        computing: Sequence[tuple[Request, int]] = (),
    ) -> None:
        self._running = running
        self._computing = computing
        self.budget = budget
        # What requests with such tokens may still take of the budget.
        self._scored: dict[Request, int] = {}
        self._ratio = ratio
        self._reserved: int | None = None
        self._given: dict[Request, int] = {}

    @property
    def chunks(self) -> list[tuple[Request, int]]:
        """What was added: a request and how many of its tokens."""
        return list(self._given.items())

    @property
    def num_free_slots(self) -> int:
        """How many more requests could run."""
        return self._running.num_free_slots

    def should_wait(self, request: Request) -> bool:
        """Whether a waiting request should wait on because one in this step or in flight computes much of its prompt.

        The other request goes on in every step and shares each chunk when it is done, so the wait ends with a cache hit.
        """
        others = [other for other, count in chain(self._given.items(), self._computing) if count > 1]
        return self._running.tokens_gained(request, others) >= WORTH_WAITING

    def start(self, request: Request) -> bool:
        """Starts a waiting request if there are a row and pages for all that is known of it; returns whether it has.

        With nothing running there always are. Otherwise there must also be pages for what it and the running requests are
        expected to generate, at least one for each.
        """
        if self.num_free_slots < 1:
            return False
        if request.whole and request.remaining > self.budget and self._given:
            return False  # it needs a step of its own
        if not self.fits(request):
            return False
        growth = self._growth(request)
        self._running.start(request, self._expected(request))
        self._reserved = (self._reserved or 0) + growth
        return True

    def fits(self, request: Request) -> bool:
        """Whether there are pages to start a request."""
        if not len(self._running):
            return True
        if self._reserved is None:
            self._reserved = sum(map(self._growth, self._running.requests))
        needed = self._running.pages_to_start(request) + self._growth(request)
        enough = needed + self._reserved <= self._running.num_available_pages
        return enough and self._running.windows_fit(self._expected(request))

    def give(self, request: Request, most: int) -> int:
        """Adds a running request's next tokens to the step, at most so many of the budget; returns how many of it they took."""
        given, most = self._given.get(request, 0), min(most, self.budget)
        left, cost = request.remaining - given, 1
        if left < 1 or most < 1:
            return 0
        if request.whole:
            most = left
        elif request.wanted_prompt_logprobs is not None:
            allowed = self._scored.setdefault(request, -(-self.budget // 2))
            if allowed < 1:
                return 0
            cost, most = _SCORED, max(1, min(most, allowed) // _SCORED)
        count = self._running.reachable(request, given + min(left, most)) - given
        if count < 1:
            return 0  # until others have left pages of a window
        self._given[request] = given + count
        self.budget -= cost * count
        if cost > 1:
            self._scored[request] -= cost * count
        return cost * count

    def _expected(self, request: Request) -> int:
        return len(request.token_ids) + self._ratio.expected_tokens(request)

    def _growth(self, request: Request) -> int:
        return max(1, self._running.pages_for(self._ratio.expected_tokens(request)))
