"""Starts waiting requests, in their order, while rows, budget and pages last.

One that does not fit, or that waits for a prefix which a running request is computing, is not overtaken. Where priorities
count, running requests of a lower level are sent back to make room for the first in order. O(waiting) a step that may admit.
"""

from __future__ import annotations

from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.scheduler.running.prefill_adder import PrefillAdder
from sapwood_worker.core.scheduler.running.retraction import NewTokenRatio, Retraction
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.waiting.admission_order import AdmissionOrder
from sapwood_worker.core.scheduler.waiting.fairness import TenantFairness
from sapwood_worker.core.scheduler.waiting.waiting_queue import WaitingQueue


class Admission:
    """Moves requests from the queue to the batch.

    Args:
        waiting: The queue.
        running: The batch.
        order: Says which request is next.
        fairness: Is charged with what is admitted.
        retraction: Makes room for higher priorities.
        ratio: What requests are expected to generate.
        tiers: The KV cache's lower tiers, told which requests no longer wait for them.

    Attributes:
        prompt_tokens: Tokens of all prompts that have been admitted.
        cached_tokens: How many of these were found in the prefix cache.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningBatch,
        order: AdmissionOrder,
        fairness: TenantFairness,
        retraction: Retraction,
        ratio: NewTokenRatio,
        tiers: HierarchicalCache | None,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._order = order
        self._fairness = fairness
        self._retraction = retraction
        self._ratio = ratio
        self._tiers = tiers
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def preempt(self, step: int, *, in_flight: bool) -> bool:
        """Makes room for the first waiting request at the cost of running ones of a lower level.

        Args:
            step: The number of the step being planned.
            in_flight: Whether a step is in flight, so that nothing can be retracted.

        Returns:
            Whether a request would have to be retracted, but a step is in flight.
        """
        running = self._running.requests
        if not self._order.by_priority or not running or not len(self._waiting):
            return False
        first = next(self._order.order(self._waiting, step), None)
        if first is None:  # all of them wait for pages that are being fetched
            return False
        level = self._order.level(first, step)
        while running and -running[-1].rank[0] < level:
            if self._running.num_free_slots and PrefillAdder(self._running, 1, self._ratio).fits(first):
                return False
            if in_flight:
                return True
            self._retraction.for_priority(running[-1], step)
        return False

    def admit(self, adder: PrefillAdder, step: int) -> None:
        """Starts waiting requests; their first chunks are added to the step being planned, number ``step``."""
        if adder.num_admissible < 1 or not len(self._waiting):
            return
        for request in self._order.order(self._waiting, step):
            if adder.num_admissible < 1 or adder.should_wait(request):
                break
            tokens = request.remaining
            request.rank = (-self._order.level(request, step), request.arrival)
            if not adder.admit(request):
                break
            self._waiting.remove(request, tokens)
            if self._tiers is not None:
                self._tiers.settle(request.serial)
            request.waited += step - request.queued_at
            if request.cached is None:
                request.cached = request.computed
                self.prompt_tokens += request.prompt_length
                self.cached_tokens += request.cached
                self._fairness.admitted(request.tenant, step)
                self._fairness.charge(request.tenant, request.remaining)
