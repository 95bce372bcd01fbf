"""Retraction: what to do when pages run out, and how to make that rare.

A retracted request gives up its row and its pages and goes back to the head of the queue. What it has generated is kept, and
its pages stay in the prefix cache as long as there is room, so that computing it again is mostly a cache hit.

The victim is always the running request of lowest rank: of the lowest priority, where priorities count, and of these the
youngest. So the first in rank is not retracted for want of pages; alone it always fits (admission sees to that), hence it ends:
neither a deadlock nor an endless exchange can be. Only a waiting request of higher priority can push it out (preemption), and
that only until it has starved (``admission_order.py``), when nothing ranks above it but older starved requests.

:class:`NewTokenRatio` estimates how much of what running requests may still generate they will (SGLang's estimate): admission
leaves as many pages free. It sinks while all goes well and rises after each retraction.
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
"""What one request is taken to generate at most: a limit of "as many as the context holds" says nothing."""


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

    def step(self) -> None:
        """A step went by without a retraction."""
        self.ratio = max(_LEAST, self.ratio * _DECAY)

    def retracted(self, running: Sequence[Request]) -> None:
        """Pages ran out: the requests still running count on what they have generated so far, and a little more."""
        allowed = sum(_limit(request) + request.generated for request in running)
        generated = sum(request.generated for request in running)
        self.ratio = min(1.0, max(self.ratio, (generated + 16 * len(running)) / max(1, allowed)))

    def expected_tokens(self, request: Request) -> int:
        """Tokens that a request is expected to generate yet."""
        return int(self._conservativeness * self.ratio * _limit(request))


class Retraction:
    """Sends running requests back to the queue.

    Args:
        running: Where they are taken from.
        waiting: Where they go to.
        ratio: Is told when pages ran out.

    Attributes:
        num_retractions: For want of pages, since the start.
        num_preemptions: To make room for a higher priority, since the start.
    """

    def __init__(self, running: RunningBatch, waiting: WaitingQueue, ratio: NewTokenRatio) -> None:
        self._running = running
        self._waiting = waiting
        self._ratio = ratio
        self.num_retractions = 0
        self.num_preemptions = 0

    def put_back(self, request: Request, step: int) -> None:
        """Takes a request's row; it waits from ``step`` on. No step in flight may compute it."""
        self._running.stop(request, RequestState.WAITING)
        request.retractions += 1
        request.queued_at = step
        self._waiting.put_back(request)

    def for_pages(self, step: int) -> None:
        """Sends the last running request back for want of pages."""
        self.put_back(choose_victim(self._running.requests), step)
        self._ratio.retracted(self._running.requests)
        self.num_retractions += 1

    def for_priority(self, request: Request, step: int) -> None:
        """Sends a request back to make room for one of a higher priority."""
        self.put_back(request, step)
        self.num_preemptions += 1


def _limit(request: Request) -> int:
    return min(_MOST_TOKENS, request.max_length - len(request.token_ids))
