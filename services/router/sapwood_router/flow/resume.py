"""Failover: what becomes of a request whose worker failed it, before its first token or in the middle of its stream.

The same loop serves both. The next worker gets the prompt followed by the tokens received so far, and what is left of
``max_tokens``; the router fixed the seed at the start, and sampling is a pure function of seed and position, so the stream
goes on as it would have. Text, stop strings and parsers live behind the detokenizer's stream, which never learns of it.

Bounds: a lost worker costs a request at most one resumption, of which it gets ``most_losses``; they are not taken from the
retry budget, since workers die one at a time whatever the traffic. One that went as planned costs it nothing: such a move says
nothing about the request, and there are no more of them than somebody plans. A worker that answered with an error is asked no
second time, and the next try needs the retry policy's consent. A request that two workers failed with an internal error is
taken for the cause. Errors that are the client's, and its deadline, end it at once.
"""

from __future__ import annotations

from sapwood_common.errors import InternalError, ResourceExhaustedError, SapwoodError, UnavailableError
from sapwood_router.fleet.outcome import WorkerLeftError, WorkerLostError
from sapwood_router.flow.retry import RetryPolicy


class Failover:
    """One request's account of what went wrong so far.

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
