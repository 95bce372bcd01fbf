"""The scheduler's part in hand-offs: which prompts and pages are offered to other workers, and what is pulled from them.

A request that hands off ends here with its prompt; its pages are kept for the worker that goes on with it (``leases.py``). There
its pages are pulled, if need be before it comes (``pulls.py``).

Complexity: O(pages of the prompt) for each prompt, O(leases) a poll.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from sapwood_worker.core.cache.handoff.leases import HandoffLeases
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.prefix_cache import PrefixCache
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import RequestOutput


class Handoffs:
    """Offers, keeps and pulls pages.

    Args:
        tiers: The KV cache's lower tiers; None: nothing is handed off.
        cache: The prefix cache.
        running: Knows the pages of running requests.
        page_size: Tokens in a page.
    """

    def __init__(
        self, tiers: HierarchicalCache | None, cache: PrefixCache, running: RunningBatch, page_size: int
    ) -> None:
        self._tiers = tiers
        self._cache = cache
        self._running = running
        self._page_size = page_size

    @property
    def _leases(self) -> HandoffLeases | None:
        return None if self._tiers is None else self._tiers.leases

    def offer(self, request: Request) -> None:
        """Offers a prompt of which a chunk has been computed: each page is kept from when it is in the host's memory on."""
        assert self._leases is not None, "the front lets no such request through"
        self._leases.offer(request.serial, request.token_ids[: request.prompt_length], request.namespace)

    def offer_whole(self, request: Request) -> None:
        """As :meth:`offer`, of a prompt that has been computed: its last ticket follows."""
        self.offer(request)
        assert self._leases is not None
        self._leases.computed(request.serial)

    def offer_chunks(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Offers the pages that the coming step fills, if they are many of one prompt: others read them while it computes.

        Args:
            chunks: Of the step: requests, and how many tokens it computes of each.
        """
        if self._tiers is None or self._leases is None or not self._leases.in_parts:
            return
        for request, count in chunks:
            end = min(request.planned + count, request.prompt_length)
            first, last = request.planned // self._page_size, end // self._page_size
            if request.hands_off and not request.over and last - first >= self._leases.in_parts:
                pages, _ = self._running.pages_of(np.array([request.slot]), np.array([end]))
                width = -(-end // self._page_size)
                filled = pages.reshape(-1, width)[:, first:last]
                prompt = request.token_ids[: request.prompt_length]
                self._tiers.computes(request.slot, request.serial, prompt, first, filled)

    def withdraw(self, request: Request) -> None:
        """Takes an offer back whose request ends before its prompt has been computed."""
        if request.hands_off and self._leases is not None:
            self._leases.withdraw(request.serial)

    def cancel(self, serial: int) -> bool:
        """Ends what is kept for an aborted request; returns whether its last ticket had not been given."""
        return self._leases is not None and self._leases.cancel(serial)

    @property
    def owes_tickets(self) -> bool:
        """Whether prompts have been computed for which :meth:`poll` has given no ticket yet."""
        return self._leases is not None and self._leases.offering

    def poll(self) -> list[RequestOutput]:
        """Ends leases whose time is over, lets go of pages of which nothing was heard for long, and returns as :meth:`tickets`.

        To be called right after all messages were taken: a step may take longer than a lease, and renewals wait meanwhile.
        """
        if self._tiers is None:
            return []
        if self._tiers.pulls is not None:
            self._tiers.pulls.lapse()
        return [] if self._leases is None else _outputs(self._leases.poll())

    def tickets(self) -> list[RequestOutput]:
        """Outputs for requests of which pages are now kept for another worker.

        While the prompt is still being computed, an output names the pages so far; the request's last output names all.
        """
        return [] if self._leases is None else _outputs(self._leases.tickets())

    def keep(self, renewed: Sequence[bytes], released: Sequence[bytes]) -> None:
        """Renews the leases of some tickets and ends those of others, by the transfers' ids; unknown ones are ignored."""
        if self._leases is not None:
            self._leases.renew(renewed)
            self._leases.release(released)

    def announced(self, ticket: HandoffTicket, prompt: array[int], namespace: bytes) -> None:
        """Pulls pages for a request that is likely to come, unless they are here already.

        Args:
            ticket: For some of its prompt's pages.
            prompt: Empty if an earlier call for the same transfer had it.
            namespace: The request's.
        """
        if self._tiers is not None and self._tiers.pulls is not None:
            self._tiers.announced(ticket, prompt, namespace, self._cache.probe(prompt, namespace)[0])


def _outputs(given: Sequence[tuple[int, HandoffTicket, bool]]) -> list[RequestOutput]:
    return [
        RequestOutput(serial, [], "handoff" if complete else None, ticket=ticket) for serial, ticket, complete in given
    ]
