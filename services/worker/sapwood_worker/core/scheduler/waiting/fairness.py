"""Fairness across tenants: the tenant that got least is next.

Algorithm: Virtual Token Counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each tenant's counter
goes up with the tokens computed for it; of the tenants that have requests waiting the one with the lowest counter is served
next. A tenant that comes back is lifted to the lowest counter of those that are busy, so that idling saves nothing up.

Bound: while two tenants both wait, the tokens that they get differ by at most one round of admissions; so one of n tenants gets
at least 1/n, however many requests the others send. If ever new tenants come, n has no bound; ``admission_order.py`` sees to it
that none starves all the same. O(1) for each charge and O(log tenants) for each admission; a counter is kept for each busy
tenant and for the ``MOST_IDLE`` that were busy last.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.scheduler.request import Request

MOST_IDLE = 1024


class TenantFairness:
    """The tenants' token counters."""

    def __init__(self) -> None:
        self._busy: dict[str, int] = {}
        self._counters: dict[str, float] = {}
        self._idle: dict[str, None] = {}
        self._admitted: dict[str, int] = {}

    def arrived(self, tenant: str) -> None:
        """Notes that one more request of the tenant is unfinished."""
        unfinished = self._busy.get(tenant, 0)
        if not unfinished:
            self._idle.pop(tenant, None)
            floor = min((self._counters[other] for other in self._busy), default=0.0)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._busy[tenant] = unfinished + 1

    def ended(self, tenant: str) -> None:
        """Notes that one request of the tenant has ended."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
            self._admitted.pop(tenant, None)
            self._idle[tenant] = None
            if len(self._idle) > MOST_IDLE:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._counters[oldest]

    def admitted(self, tenant: str, step: int) -> None:
        """Notes that a new request of a busy tenant was admitted in this step."""
        self._admitted[tenant] = step

    def admitted_at(self, tenant: str) -> int:
        """The last step in which a new request of a busy tenant was admitted; -1: none since it became busy."""
        return self._admitted.get(tenant, -1)

    def charge(self, tenant: str, tokens: int) -> None:
        """Adds tokens that are computed for a busy tenant to its counter."""
        self._counters[tenant] += tokens

    def charge_each(self, requests: Sequence[Request]) -> None:
        """Adds one token for each of these requests, whose tenants are busy."""
        if len(self._busy) == 1 and requests:
            self._counters[requests[0].tenant] += len(requests)
            return
        counters = self._counters
        for request in requests:
            counters[request.tenant] += 1

    def served(self, tenant: str) -> float:
        """A busy tenant's counter."""
        return self._counters[tenant]
