"""Fills the token budget that a step's decodes leave with chunks of prompts."""

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
computed for it. Without this, a step of 400 such tokens took 20 s on two busy cores, and all other requests waited. Such tokens
get at most half of the budget that is left, so that the next request can begin beside them.
"""


class PrefillAdder:
    """One step's prefill.

    Args:
        running: The running requests; admitted ones join them.
        budget: Tokens this step may prefill.
        ratio: How much of their ``max_tokens`` requests will generate; pages for that stay in reserve.
        computing: The chunks that steps in flight compute, in the form of ``chunks``.

    Attributes:
        chunks: What was added: a request and how many of its tokens.
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
        self._budget = budget
        self._ratio = ratio
        self._reserved: int | None = None
        self.chunks: list[tuple[Request, int]] = []

    @property
    def num_admissible(self) -> int:
        """The most waiting requests that this step could still admit."""
        return min(self._budget, self._running.num_free_slots)

    def continue_running(self, requests: Sequence[Request]) -> None:
        """Adds the next chunk of each of these running requests, by rank, which are not through their prompts."""
        for request in requests:
            if self._budget > 0 and request.slot >= 0:  # -1: it has been retracted
                self._add(request)

    def should_wait(self, request: Request) -> bool:
        """Whether a waiting request should wait on because one in this step or in flight computes much of its prompt.

        The other request goes on in every step and shares each chunk when it is done, so the wait ends with a cache hit.
        """
        others = [other for other, count in chain(self.chunks, self._computing) if count > 1]
        return self._running.tokens_gained(request, others) >= WORTH_WAITING

    def admit(self, request: Request) -> bool:
        """Starts a waiting request if there are pages for all that is known of it; its first chunk is added.

        With nothing running it always fits. Otherwise there must also be pages for what it and the running requests are
        expected to generate, at least one for each.
        """
        if request.whole and request.remaining > self._budget and self.chunks:
            return False  # it needs a step of its own
        if not self.fits(request):
            return False
        growth = self._growth(request)
        self._running.start(request, self._expected(request))
        self._reserved = (self._reserved or 0) + growth
        self._add(request)
        return True

    def fits(self, request: Request) -> bool:
        """Whether :meth:`admit` would admit it."""
        if not len(self._running):
            return True
        if self._reserved is None:
            self._reserved = sum(map(self._growth, self._running.requests))
        needed = self._running.pages_to_start(request) + self._growth(request)
        enough = needed + self._reserved <= self._running.num_available_pages
        return enough and self._running.windows_fit(self._expected(request))

    def _expected(self, request: Request) -> int:
        return len(request.token_ids) + self._ratio.expected_tokens(request)

    def _growth(self, request: Request) -> int:
        return max(1, self._running.pages_for(self._ratio.expected_tokens(request)))

    def _add(self, request: Request) -> None:
        scored = request.wanted_prompt_logprobs is not None
        cost, most = (_SCORED, -(-self._budget // (2 * _SCORED))) if scored else (1, self._budget)
        count = request.remaining if request.whole else min(request.remaining, most)
        count = self._running.reachable(request, count)
        if count < 1:
            return  # until others have left pages of a window
        self._budget -= cost * count
        self.chunks.append((request, count))
