"""One request that two workers compute: its times, which its model's costs learn from, and pages that are read early.

A decode worker reads a prompt's pages while the prefill worker still computes the rest. It is chosen when the first pages can be
read, and learns of more as they come. When the prompt is computed the request goes there, if it still can, and finds all but the
last of them. Whatever of this is lost costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import ModelCosts
from sapwood_router.flow.disaggregation.decision import Part
from sapwood_router.flow.disaggregation.weighing import prefilling
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.transport.held_tickets import HeldTicket
from sapwood_router.transport.shared_call import TOKENS_A_MESSAGE


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


class EarlyPull:
    """The early pull of one request.

    Args:
        worker: The decode worker that reads the pages.
        choice: Why it was chosen.
    """

    def __init__(self, worker: Worker, choice: Choice) -> None:
        self._worker = worker
        self._choice = choice
        self._ticket: HeldTicket | None = None

    def announce(self, ticket: HeldTicket, prompt: PromptPages, cache_salt: str) -> None:
        """Tells of more pages; keeps the ticket until :meth:`release` or the next one of another transfer."""
        again = self._ticket is not None and self._ticket.message.transfer_id == ticket.message.transfer_id
        self.release(ticket)
        self._ticket = ticket
        if len(prompt.token_ids) > TOKENS_A_MESSAGE:  # to send it twice would keep other requests waiting
            return
        pages = worker_pb2.HandoffAnnouncement(ticket=ticket.message)
        if not again:
            pages.token_ids.extend(prompt.token_ids)
            pages.cache_salt, pages.lora_name = cache_salt, prompt.lora
        if self._worker.session is not None:
            self._worker.session.announce(pages)

    def chosen(self, demand: Demand) -> tuple[Worker, Choice] | None:
        """The worker that has read, and why it was chosen; None: it cannot take the request now."""
        try:
            [worker] = eligible([self._worker], demand).workers
        except (UnavailableError, InvalidArgumentError):
            return None
        return (worker, self._choice) if worker.in_flight < worker.most_requests else None

    def release(self, kept: HeldTicket | None = None) -> None:
        """The pages that were announced are not needed any more, unless they are those of ``kept``."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None and (kept is None or ticket.message.transfer_id != kept.message.transfer_id):
            ticket.release()
