"""One request's times, told to its model's costs."""

from __future__ import annotations

from collections.abc import Callable

from sapwood_router.fleet.worker import Work, Worker
from sapwood_router.flow.disaggregation.costs import ModelCosts
from sapwood_router.flow.disaggregation.decision import MOST_PREFILLING, Part


class Timing:
    """Notes when a request's workers were asked and answered. A try that fails tells nothing.

    Args:
        costs: Its model's.
        clock: Seconds, monotonic.
    """

    def __init__(self, costs: ModelCosts, clock: Callable[[], float]) -> None:
        self._costs = costs
        self._clock = clock
        self._worker: Worker | None = None
        self._part = Part.WHOLE
        self._tokens = 0
        self._since = 0.0
        self._behind = 0.0
        """Seconds that a decode worker takes for the prompts queued before it; they are none of a hand-over's."""
        self._first = 0.0
        self._before = Work(0.0, 0)
        """The worker's until the first token."""
        self._ticket: float | None = None

    def sent(self, worker: Worker, part: Part, lacking: int) -> None:
        """A worker is asked, and has the request on its account.

        Args:
            worker: The worker.
            part: What it is asked for.
            lacking: Prompt tokens that it is believed not to hold.
        """
        assert worker.model is not None
        self._worker, self._part = worker, part
        self._tokens, self._since, self._behind = worker.view().queued_tokens, self._clock(), 0.0
        if part is Part.DECODE:
            self._behind = self._costs.prefill(worker.model.role, max(0, self._tokens - 1))  # one is its own
            self._tokens = lacking
            if self._ticket is not None:
                self._since = self._ticket
        self._ticket = None

    def answers(self) -> None:
        """The worker's first token has come."""
        assert self._worker is not None and self._worker.model is not None
        self._first, self._before = self._clock(), self._worker.work()
        seconds = self._first - self._since
        if self._part is Part.DECODE:
            self._costs.handed_over(self._tokens, max(0.0, seconds - self._behind))
        else:
            self._costs.prefilled(self._worker.model.role, self._tokens, seconds)

    def handed_off(self) -> None:
        """The ticket has come."""
        self._ticket = self._clock()

    def ended(self, tokens: int, whole: int) -> None:
        """The answer is complete.

        Args:
            tokens: How many the last worker generated.
            whole: Tokens of the whole answer.
        """
        assert self._worker is not None and self._worker.model is not None
        costs, seconds, work = self._costs, self._clock() - self._first, self._worker.work()
        if seconds > 0:
            requests = (work.generating - self._before.generating) / seconds
            prompts = costs.prefill(self._worker.model.role, work.prompt_tokens - self._before.prompt_tokens)
            costs.generated(tokens - 1, seconds, requests, min(MOST_PREFILLING, prompts / seconds))
        costs.answered(whole)
