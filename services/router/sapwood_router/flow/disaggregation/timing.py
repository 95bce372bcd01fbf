"""One request's times, told to its model's costs."""

from __future__ import annotations

from collections.abc import Callable

from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import ModelCosts
from sapwood_router.flow.disaggregation.decision import Part
from sapwood_router.flow.disaggregation.weighing import prefilling


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
        self._queued = self._lacking = 0
        self._since = 0.0
        self._first = 0.0
        self._ticket: float | None = None

    def sent(self, worker: Worker, part: Part, lacking: int) -> None:
        """A worker is asked, and has the request on its account.

        Args:
            worker: The worker.
            part: What it is asked for.
            lacking: Prompt tokens that it is believed not to hold.
        """
        now = self._clock()
        self._worker, self._part = worker, part
        self._queued = worker.view().queued_tokens
        self._lacking = lacking
        self._since = now if part is not Part.DECODE or self._ticket is None else self._ticket
        self._ticket = None

    def answers(self) -> None:
        """The worker's first token has come."""
        self._first = self._clock()
        seconds = self._first - self._since
        if self._part is Part.DECODE:
            waited = self._costs.prefill(self._queued - 1)  # its own last token is one of them
            self._costs.handed_over(self._lacking, max(0.0, seconds - waited))
        else:
            self._costs.prefilled(self._queued, seconds)

    def handed_off(self) -> None:
        """The ticket has come."""
        self._ticket = self._clock()

    def ended(self, tokens: int, whole: int) -> None:
        """The answer is complete.

        Args:
            tokens: How many the last worker generated.
            whole: Tokens of the whole answer.
        """
        assert self._worker is not None
        costs = self._costs
        requests = self._worker.generating + 1  # its own place there was given back
        costs.generated(tokens - 1, self._clock() - self._first, requests, prefilling(self._worker, costs))
        costs.answered(whole)
