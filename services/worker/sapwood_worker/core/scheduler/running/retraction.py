"""Retraction: what to do when pages run out, and how to make that rare.

A retracted request gives up its row and its pages and goes back to the head of the queue. What it has generated is kept, and
its pages stay in the prefix cache as long as there is room, so that computing it again is mostly a cache hit.

The victim is always the last running request by rank: of the lowest priority, where priorities count, and of these the youngest.
So the first by rank is never retracted for want of pages. Alone it always fits (admission sees to that), hence it ends, and there
is neither deadlock nor livelock. Only a waiting request of higher priority can push it out (preemption), and only until it has
starved (``admission_order.py``): then only older starved requests come before it.

:class:`NewTokenRatio` estimates which share of their remaining ``max_tokens`` running requests will generate (SGLang's estimate):
admission leaves as many pages free. The ratio sinks with each step without a retraction and rises with each retraction.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.state import RequestState
from sapwood_worker.core.scheduler.waiting.waiting_queue import WaitingQueue

_FIRST, _LEAST = 0.3, 0.05
_DECAY = 0.995
_MOST_TOKENS = 2048
"""Tokens that one request is expected to generate at most: a limit as large as the context says nothing."""


def choose_victim(running: Sequence[Request]) -> Request:
    """The request to retract, of at least one, by rank."""
    return running[-1]


class NewTokenRatio:
    """The share of their remaining ``max_tokens`` that running requests are expected to generate.

    Args:
        conservativeness: Factor on what is expected; 0 expects nothing and leaves all to retraction.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._conservativeness = conservativeness
        self.ratio = _FIRST

    def step(self, lanes: int = 1) -> None:
        """Notes a step without a retraction, in which one of so many running requests decodes."""
        self.ratio = max(_LEAST, self.ratio * _DECAY ** (1 / lanes))

    def retracted(self, running: Sequence[Request]) -> None:
        """Raises the ratio after pages ran out, by what the requests still running have generated so far and a little more."""
        allowed = sum(_limit(request) + request.generated for request in running)
        generated = sum(request.generated for request in running)
        self.ratio = min(1.0, max(self.ratio, (generated + 16 * len(running)) / max(1, allowed)))

    def expected_tokens(self, request: Request) -> int:
        """Tokens that a request is expected to generate yet."""
        return int(self._conservativeness * self.ratio * _limit(request))


class Retraction:
    """Sends running requests back to the queue.

    Args:
        running: The batch that requests are taken from.
        waiting: The queue that they go to.
        ratio: Is told when pages ran out.

    Attributes:
        num_retractions: Retractions for want of pages since the start.
        num_preemptions: Retractions to make room for a higher priority since the start.
    """

    def __init__(self, running: RunningBatch, waiting: WaitingQueue, ratio: NewTokenRatio) -> None:
        self._running = running
        self._waiting = waiting
        self._ratio = ratio
        self.num_retractions = 0
        self.num_preemptions = 0

    def put_back(self, request: Request, step: int) -> None:
        """Takes a request's row and puts it back into the queue at ``step``. No step in flight may compute it."""
        self._running.stop(request, RequestState.WAITING)
        request.retractions += 1
        request.queued_at = step
        self._waiting.put_back(request)

    def for_pages(self, step: int) -> None:
        """Sends the last running request by rank back for want of pages."""
        self.put_back(choose_victim(self._running.requests), step)
        self._ratio.retracted(self._running.requests)
        self.num_retractions += 1

    def for_priority(self, request: Request, step: int) -> None:
        """Sends a request back to make room for one of a higher priority."""
        self.put_back(request, step)
        self.num_preemptions += 1


def _limit(request: Request) -> int:
    return min(_MOST_TOKENS, request.max_length - len(request.token_ids))
