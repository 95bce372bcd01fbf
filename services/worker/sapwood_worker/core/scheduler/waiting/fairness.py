"""Fairness across tenants: who got least is next.

Algorithm: Virtual Token Counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each tenant's counter
goes up with the tokens computed for it; of the tenants that have requests waiting the one with the lowest counter is served
next. A tenant that comes back is lifted to the lowest counter of those that are busy, so that idling saves nothing up.

Bound: while two tenants both wait, what they get differs by at most what one round of admissions gives one of them; so one of n
tenants gets at least its n-th share, however many requests the others send. If ever new tenants come, n has no bound; that
none of them starves all the same is ``admission_order.py``'s matter. O(1) a token and O(log tenants) an admission; a
counter is kept for each busy tenant and for the ``MOST_IDLE`` that were busy last.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.scheduler.request import Request

MOST_IDLE = 1024


class TenantFairness:
    """The counters."""

    def __init__(self) -> None:
        self._busy: dict[str, int] = {}
        self._counters: dict[str, float] = {}
        self._idle: dict[str, None] = {}
        self._admitted: dict[str, int] = {}

    def arrived(self, tenant: str) -> None:
        """One more request of the tenant's is unfinished."""
        unfinished = self._busy.get(tenant, 0)
        if not unfinished:
            self._idle.pop(tenant, None)
            floor = min((self._counters[other] for other in self._busy), default=0.0)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._busy[tenant] = unfinished + 1

    def ended(self, tenant: str) -> None:
        """One request of the tenant's has ended."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
            self._admitted.pop(tenant, None)
            self._idle[tenant] = None
            if len(self._idle) > MOST_IDLE:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._counters[oldest]

    def admitted(self, tenant: str, step: int) -> None:
        """A new request of a busy tenant's was admitted in this step."""
        self._admitted[tenant] = step

    def admitted_at(self, tenant: str) -> int:
        """The step in which a new request of a busy tenant's was admitted last; -1: in none since it has been busy."""
        return self._admitted.get(tenant, -1)

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens are computed for a busy tenant."""
        self._counters[tenant] += tokens

    def charge_each(self, requests: Sequence[Request]) -> None:
        """One token is computed for each of these requests, whose tenants are busy."""
        if len(self._busy) == 1 and requests:
            self._counters[requests[0].tenant] += len(requests)
            return
        counters = self._counters
        for request in requests:
            counters[request.tenant] += 1

    def served(self, tenant: str) -> float:
        """A busy tenant's counter."""
        return self._counters[tenant]
