"""Which waiting request is admitted next, over all tenants and priorities.

Order, each rule among the equals of the one before:
1. by priority, the highest first (all are equal unless the policy is ``priority``);
2. requests that were retracted before all others, by arrival;
3. by tenant: the one that got least first (``fairness.py``), among equals the one whose next request is the oldest;
4. within a tenant the policy's order.

Starvation: a request that has waited ``starved_after`` steps in all goes before its tenant's others, counts as one of the highest
priority, and keeps that rank when it runs. Shares alone do not bound the wait: new tenants may keep coming, each with a share to
claim. So if a tenant's oldest request starves, and none of its new requests was admitted for ``starved_after`` steps, the tenant
gets one turn before all shares, by arrival. Hence the i-th oldest starved request of a tenant waits for at most i such periods
and for all older requests.

O(waiting) and what the policy takes, in steps that may admit something.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.waiting.fairness import TenantFairness
from sapwood_worker.core.scheduler.waiting.policy import WINDOW, Policy
from sapwood_worker.core.scheduler.waiting.waiting_queue import WaitingQueue

TOP = 1 << 40
"""The level of a starved request: above every priority."""


class Level(NamedTuple):
    """Waiting requests of one level: those that were retracted, by arrival, and each tenant's others in their order."""

    retracted: list[Request]
    tenants: dict[str, list[Request]]


class AdmissionOrder:
    """The order of admission.

    Args:
        policy: Orders one tenant's requests.
        fairness: Says which tenant is next.
        by_priority: Whether priorities count.
        starved_after: Steps of waiting after which a request is not overtaken any more.
    """

    def __init__(self, policy: Policy, fairness: TenantFairness, *, by_priority: bool, starved_after: int) -> None:
        self._policy = policy
        self._fairness = fairness
        self.by_priority = by_priority
        self._starved_after = starved_after

    def level(self, request: Request, step: int) -> int:
        """The request's priority when requests compete for pages, TOP once it starves; 0 unless priorities count."""
        if not self.by_priority:
            return 0
        return TOP if self.starved(request, step) else request.priority

    def order(self, waiting: WaitingQueue, step: int) -> Iterator[Request]:
        """The waiting requests, the one to admit first first, where rows and pages are scarce.

        Args:
            waiting: The queue.
            step: The number of the step being planned.
        """
        levels = self.levels(waiting, step)
        for level in sorted(levels, reverse=True):
            yield from levels[level].retracted
            yield from self._fair(levels[level].tenants, step)

    def levels(self, waiting: WaitingQueue, step: int) -> dict[int, Level]:
        """The waiting requests by level."""
        levels: dict[int, Level] = {}
        for request in waiting.retracted():
            levels.setdefault(self.level(request, step), Level([], {})).retracted.append(request)
        for priority, tenant, queue in waiting.queues():
            requests = [request for request in queue.values() if not request.held]
            if not requests:
                continue
            # Requests stand by arrival, so the starved ones are the first.
            starved = list(takewhile(lambda request: self.starved(request, step), requests[:WINDOW]))
            rest = self._policy.sort(requests[len(starved) :])
            if not self.by_priority:
                levels.setdefault(0, Level([], {})).tenants[tenant] = starved + rest
                continue
            if starved:
                levels.setdefault(TOP, Level([], {})).tenants.setdefault(tenant, []).extend(starved)
            if rest:
                levels.setdefault(priority, Level([], {})).tenants[tenant] = rest
        for number, level in levels.items():
            level.retracted.sort(key=_by_arrival)
            if number == TOP:
                for requests in level.tenants.values():
                    requests.sort(key=_by_arrival)
        return levels

    def by_share(self, tenants: Mapping[str, Request], step: int) -> list[str]:
        """Tenants with the request that each would have next: those with a turn first, then the one that got least."""

        def key(tenant: str) -> tuple[float, int]:
            request = tenants[tenant]
            turn = request.slot < 0 and self.has_turn(request, step)
            return (-1.0 if turn else self._fairness.served(tenant)), request.arrival

        return sorted(tenants, key=key)

    def _fair(self, tenants: dict[str, list[Request]], step: int) -> Iterator[Request]:
        """Requests of several tenants: one of each that starves, then each time one of the tenant that will have got least."""
        if len(tenants) == 1:
            [requests] = tenants.values()
            yield from requests
            return
        turns = [tenant for tenant, requests in tenants.items() if self.has_turn(requests[0], step)]
        turns.sort(key=lambda tenant: tenants[tenant][0].arrival)
        yield from (tenants[tenant][0] for tenant in turns)
        heap: list[tuple[float, int, str, int]] = []
        for tenant, requests in tenants.items():
            served, first = self._fairness.served(tenant), 0
            if tenant in turns:
                served, first = served + requests[0].remaining, 1
            if first < len(requests):
                heap.append((served, requests[first].arrival, tenant, first))
        heapq.heapify(heap)
        while heap:
            served, _, tenant, index = heap[0]
            requests = tenants[tenant]
            request = requests[index]
            if index + 1 < len(requests):
                following = served + request.remaining, requests[index + 1].arrival, tenant, index + 1
                heapq.heapreplace(heap, following)
            else:
                heapq.heappop(heap)
            yield request

    def has_turn(self, oldest: Request, step: int) -> bool:
        """Whether a tenant with this request at its head goes before those who have got less."""
        since = step - self._fairness.admitted_at(oldest.tenant)
        return self.starved(oldest, step) and since >= self._starved_after

    def starved(self, request: Request, step: int) -> bool:
        """Whether a request has waited so long that nothing overtakes it any more."""
        queued = step - request.queued_at if request.slot < 0 else 0
        return request.waited + queued >= self._starved_after


def _by_arrival(request: Request) -> int:
    return request.arrival
