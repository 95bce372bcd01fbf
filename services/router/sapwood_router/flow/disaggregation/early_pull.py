"""A decode worker reads a prompt's pages while the prefill worker still computes the rest.

It is chosen when the first pages can be read, and told of more as they come. When the prompt is computed the request goes there,
if it still can, and finds all but the last of them. Whatever of this is lost costs time and nothing else.
"""

from __future__ import annotations

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.transport.held_tickets import HeldTicket
from sapwood_router.transport.shared_call import TOKENS_A_MESSAGE


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
            pages.cache_salt = cache_salt
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
