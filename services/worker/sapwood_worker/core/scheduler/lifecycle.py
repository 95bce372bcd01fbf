"""How requests enter and leave the scheduler: accepted or refused, aborted, expired, ended. Each ends exactly once.

Complexity: O(1), and a lookup in the cache's third tier when a request comes, and O(its pages) when it ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container

from sapwood_common.errors import InvalidArgumentError
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.prefix_cache import PrefixCache
from sapwood_worker.core.scheduler.completion import end_output, may_jump, stop_tokens
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.handoffs import Handoffs
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.state import RequestState
from sapwood_worker.core.scheduler.waiting.fairness import TenantFairness
from sapwood_worker.core.scheduler.waiting.waiting_queue import WaitingQueue
from sapwood_worker.records.output import RequestOutput


class Lifecycle:
    """Begins and ends requests.

    Args:
        config: The scheduler's.
        limit: Most tokens of a request, prompt and output together.
        waiting: The queue of requests that were let in.
        running: The batch that admission moves them to.
        fairness: Is told which tenants are busy.
        cache: The prefix cache.
        tiers: The KV cache's lower tiers; None: there are none.
        handoffs: Keeps pages of requests for other workers.

    Attributes:
        requests: Those that have not ended, by serial.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limit: int,
        waiting: WaitingQueue,
        running: RunningBatch,
        fairness: TenantFairness,
        cache: PrefixCache,
        tiers: HierarchicalCache | None,
        handoffs: Handoffs,
    ) -> None:
        self._config = config
        self._limit = limit
        self._waiting = waiting
        self._running = running
        self._fairness = fairness
        self._cache = cache
        self._tiers = tiers
        self._handoffs = handoffs
        self._deadlines = Deadlines()
        self._arrivals = 0
        self.requests: dict[int, Request] = {}

    def add(self, request: Request, step: int) -> None:
        """Lets a request in, before the step of this number; its first tokens are computed in one of the next.

        Raises:
            InvalidArgumentError: It can never run: its prompt leaves no room in the context.
            ResourceExhaustedError: The queue is full.
        """
        assert request.serial not in self.requests, f"serial {request.serial} is taken"
        if not request.prompt_length:
            raise InvalidArgumentError("token_ids is empty: there is no prompt", field="token_ids")
        if request.prompt_length >= self._limit + bool(request.pooling):
            raise InvalidArgumentError(
                f"prompt of {request.prompt_length} tokens leaves no room in the context of {self._limit} tokens",
                field="token_ids",
            )
        if self._config.policy != "priority":
            request.priority = 0
        request.whole = self._config.whole_prompts
        self._waiting.add(request)
        self.requests[request.serial] = request
        self._fairness.arrived(request.tenant)
        if request.deadline is not None:
            self._deadlines.add(request.serial, request.deadline, self.requests)
        request.max_length = min(self._limit, request.max_length)
        request.stops = stop_tokens(request.sampling, self._config.eos_token_ids)
        request.jumps = self._config.jump_forward and may_jump(request)
        request.arrival = self._arrivals
        request.queued_at = step
        request.size = None
        self._arrivals += 1
        if self._tiers is not None:
            cached = self._cache.probe(request.reusable, request.namespace)[0]
            request.held = self._tiers.queued(
                request.serial, request.reusable[:-1], request.namespace, cached, request.ticket
            )

    def give_away(self, request: Request | None, suits: Callable[[Request], bool]) -> Request | None:
        """Forgets a waiting request as if it had not come, and returns it, if it has never run and suits the scheduler that is
        to take it."""
        if request is None or request.cached is not None or not suits(request):
            return None
        self._waiting.remove(request, request.remaining)
        if self._tiers is not None:
            self._tiers.settle(request.serial)
        self._fairness.ended(request.tenant)
        return self.requests.pop(request.serial)

    def abort(self, serial: int) -> bool:
        """Ends a request; its pages are free before the next step (after the steps in flight, if it is part of one).

        Returns:
            Whether there was such a request. It gets no further output.
        """
        request = self.requests.get(serial)
        if request is None or request.over:
            return self._handoffs.cancel(serial)
        self.end(request)
        return True

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends the requests whose deadline has passed by ``now``, as :meth:`abort` does; returns their last outputs."""
        outputs: list[RequestOutput] = []
        for serial in self._deadlines.passed(now):
            request = self.requests.get(serial)
            if request is not None and not request.over:
                outputs.append(end_output(request, "deadline"))
                self.abort(serial)
        return outputs

    def end(self, request: Request) -> None:
        """Ends a request once no step in flight computes it."""
        self._handoffs.withdraw(request)
        if request.in_flight:
            request.over = True
        else:
            self.finish(request)

    def finish(self, request: Request) -> None:
        """Ends a request that no step in flight computes; what is computed of it stays in the cache, if it may be shared."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request, request.remaining)
            request.become(RequestState.FINISHED)
            if self._tiers is not None:
                self._tiers.settle(request.serial)
        else:
            self._running.stop(request, RequestState.FINISHED, keep=request.shared)
        if request.grammar is not None:
            request.grammar.close()
        self._fairness.ended(request.tenant)
        del self.requests[request.serial]


# When waiting and running requests must end: a heap, with entries of ended requests dropped as they come up.
#
# O(log n) for each request. Bound: when entries of ended requests outnumber the others, the heap is rebuilt.
_LEAST = 64


class Deadlines:
    """Deadlines by serial."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._rebuild_at = _LEAST

    def add(self, serial: int, deadline: float, unfinished: Container[int]) -> None:
        """Notes a deadline; ``unfinished`` are the serials of requests that have not ended."""
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[1] in unfinished]
            heapq.heapify(self._heap)
            self._rebuild_at = max(_LEAST, 2 * len(self._heap))
        heapq.heappush(self._heap, (deadline, serial))

    def passed(self, now: float) -> list[int]:
        """Takes out and returns the serials whose deadline has passed, the earliest first; some may have ended before."""
        passed: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[1])
        return passed
