"""Hand-offs of ranks that have requests of their own: each has its part, and pages are pulled where the request is to run."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from sapwood_worker.core.scheduler.handoffs import Handoffs
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import RequestOutput

_MOST_PROMISED = 1024
"""Requests that are likely to come whose rank is remembered; for an older one pages are read again."""


class RankHandoffs:
    """Does for several ranks what :class:`Handoffs` does for one.

    Args:
        ranks: Each rank's part.
        choose: The rank for a request of whose tokens each rank lacks so many.
    """

    def __init__(self, ranks: Sequence[Handoffs], choose: Callable[[Sequence[int]], int]) -> None:
        self._ranks = ranks
        self._choose = choose
        # By the transfer.
        self._promised: dict[bytes, int] = {}

    @property
    def owes_tickets(self) -> bool:
        """As :attr:`Handoffs.owes_tickets`."""
        return any(each.owes_tickets for each in self._ranks)

    def poll(self) -> list[RequestOutput]:
        """As :meth:`Handoffs.poll`."""
        return [output for each in self._ranks for output in each.poll()]

    def tickets(self) -> list[RequestOutput]:
        """As :meth:`Handoffs.tickets`."""
        return [output for each in self._ranks for output in each.tickets()]

    def keep(self, renewed: Sequence[bytes], released: Sequence[bytes]) -> None:
        """As :meth:`Handoffs.keep`."""
        for each in self._ranks:
            each.keep(renewed, released)

    def announced(self, ticket: HandoffTicket, prompt: array[int], namespace: bytes) -> None:
        """As :meth:`Handoffs.announced`, at the rank that is to have the request."""
        rank = self._promised.get(ticket.transfer_id)
        if rank is None:
            if not prompt:  # its first announcement has been forgotten
                return
            while len(self._promised) >= _MOST_PROMISED:
                del self._promised[next(iter(self._promised))]
            rank = self._promised[ticket.transfer_id] = self._choose([len(prompt)] * len(self._ranks))
        self._ranks[rank].announced(ticket, prompt, namespace)

    def take_rank(self, ticket: HandoffTicket | None) -> int | None:
        """The rank where the pages of a request that has come were pulled, and forgets it; None: at none."""
        return None if ticket is None else self._promised.pop(ticket.transfer_id, None)
