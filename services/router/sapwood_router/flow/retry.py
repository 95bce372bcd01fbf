"""When and after how long a request is tried again on another worker: before its first token, or in the middle of its stream.

Algorithm: exponential backoff with full jitter (Brooker, "Exponential Backoff and Jitter", AWS 2015): before the k-th retry a
uniformly random time up to ``base x 2^(k-1)``, at most ``cap``. A budget over all requests (as in Finagle) bounds what retries
add to the load when many requests fail: within any ``window`` seconds at most ``reserve`` plus ``ratio`` of the requests.

Complexity: O(1) a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.errors import InternalError, ResourceExhaustedError, SapwoodError, UnavailableError
from sapwood_net.pacing.sliding_count import SlidingCount
from sapwood_router.fleet.circuit_breaker import WorkerLeftError, WorkerLostError


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How often and how late; times in seconds.

    Attributes:
        attempts: Most tries of a request, the first included.
        base, cap: Seconds of the first and of the longest backoff.
        ratio: Retries per request that the budget allows.
        reserve: Retries that it allows on top, so that a quiet router may retry at all.
        window: Seconds that the budget looks back.
    """

    attempts: int = 4
    base: float = 0.02
    cap: float = 1.0
    ratio: float = 0.2
    reserve: int = 10
    window: float = 10.0


class RetryBudget:
    """Counts requests and retries of the whole router.

    Args:
        settings: The bounds.
        clock: Seconds, monotonic.
    """

    def __init__(self, settings: RetrySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._requests = SlidingCount(settings.window, clock)
        self._retries = SlidingCount(settings.window, clock)

    def request(self) -> None:
        """A request came in."""
        self._requests.add()

    def take(self) -> bool:
        """Takes one retry from the budget, if it holds one."""
        if self._retries.total() + 1 > self._settings.reserve + self._settings.ratio * self._requests.total():
            return False
        self._retries.add()
        return True


class RetryPolicy:
    """Decides on retries. Shared by all requests.

    Args:
        settings: The bounds.
        clock: Seconds, monotonic: the one that deadlines are on.
        rng: Source of the jitter.
    """

    def __init__(self, settings: RetrySettings, clock: Callable[[], float], rng: random.Random) -> None:
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self.budget = RetryBudget(settings, clock)

    def delay(self, retries: int, deadline: float) -> float | None:
        """Seconds to wait before the next try; None if there is to be none. Takes from the budget.

        Args:
            retries: How often the request was tried again before.
            deadline: When its client stops waiting: no retry starts after that.
        """
        settings = self._settings
        if retries + 1 >= settings.attempts:
            return None
        delay = self._rng.uniform(0.0, min(settings.cap, settings.base * 2**retries))
        if self._clock() + delay >= deadline or not self.budget.take():
            return None
        return delay


class Failover:
    """One request's account of what went wrong so far.

    The next worker gets the prompt followed by the tokens received so far, and what is left of ``max_tokens``. The router fixed
    the seed at the start, and sampling is a pure function of seed and position, so the stream continues as it would have. Text,
    stop strings and parsers are behind the stream, which does not notice. Bounds:

    - A lost worker costs a request one of its ``most_losses`` resumptions. Resumptions are not taken from the retry
      budget, because workers die one at a time, whatever the traffic.
    - A worker that left as planned costs nothing: it says nothing about the request, and operators plan few such moves.
    - A worker that answered with an error is not asked again, and the next try needs the retry policy's consent.
    - After internal errors of two workers the request itself is taken for the cause, and ends.
    - Errors of the client's making, and its deadline, end the request at once.

    Args:
        policy: Grants retries.
        most_losses: Workers that may be lost under the request before it fails.

    Attributes:
        losses: Workers lost under it.
        retries: Tries granted after errors that workers answered with.
        refused_by: Workers that answered with an error: not asked again.
    """

    def __init__(self, policy: RetryPolicy, most_losses: int) -> None:
        self._policy = policy
        self._most_losses = most_losses
        self._internal_errors = 0
        self.losses = 0
        self.retries = 0
        self.refused_by: set[str] = set()

    def after(self, error: SapwoodError, worker: str, deadline: float) -> float | None:
        """Seconds to wait before the next try; None if the request ends with ``error``.

        Args:
            error: How the attempt ended.
            worker: Address of the worker that failed it.
            deadline: The request's.
        """
        if isinstance(error, WorkerLeftError):
            return 0.0
        if isinstance(error, WorkerLostError):
            self.losses += 1
            return 0.0 if self.losses <= self._most_losses else None
        if not isinstance(error, UnavailableError | ResourceExhaustedError | InternalError):
            return None
        self.refused_by.add(worker)
        if isinstance(error, InternalError):
            self._internal_errors += 1
            if self._internal_errors > 1:
                return None
        delay = self._policy.delay(self.retries, deadline)
        if delay is not None:
            self.retries += 1
        return delay
