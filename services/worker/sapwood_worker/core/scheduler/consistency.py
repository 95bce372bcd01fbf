"""Checks of the queue and the batch against each other, request by request; for tests. O(requests)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.running.step_in_flight import StepInFlight
from sapwood_worker.core.scheduler.state import RequestState
from sapwood_worker.core.scheduler.waiting.waiting_queue import WaitingQueue


def check_requests(
    requests: Mapping[int, Request], waiting: WaitingQueue, running: RunningBatch, in_flight: Sequence[StepInFlight]
) -> None:
    """Compares all unfinished requests, by serial, with where they are.

    Raises:
        AssertionError: One is nowhere or in two places, in a wrong state, or miscounted.
    """
    found: set[Request] = set()
    tokens = 0
    for request in waiting:
        assert request.state is RequestState.WAITING and request.slot < 0
        tokens += request.remaining
        found.add(request)
    assert tokens == waiting.num_tokens and len(found) == len(waiting), "the queue is miscounted"
    rank: tuple[int, int] | None = None
    flights = Counter(request.serial for step in in_flight for request in step.requests)
    for request in running.requests:
        assert rank is None or rank <= request.rank, "what runs is not in order"
        rank = request.rank
        assert request.state is RequestState.RUNNING and request.slot >= 0
        assert request.in_flight == flights[request.serial], "steps in flight are miscounted"
        assert request.in_flight or (request.planned == request.computed and not request.unknown)
        assert request.in_flight or not request.over, "a request is over, but still there"
        assert request.planned <= request.capacity == running.capacity(request), "tokens without a page"
        assert request.planned <= request.reach, "tokens without a page of a window"
        found.add(request)
    assert len(found) == len(waiting) + len(running), "a request is in two places"
    assert found == set(requests.values()), "a request is nowhere"
