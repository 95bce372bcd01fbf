"""Failover: decides how a request goes on whose worker failed, before its first token or in the middle of its stream.

Both cases are treated alike. The next worker gets the prompt followed by the tokens received so far, and what is left of
``max_tokens``. The router fixed the seed at the start, and sampling is a pure function of seed and position, so the stream
continues as it would have. Text, stop strings and parsers are behind the detokenizer's stream, which does not notice.

Bounds:
- A lost worker costs a request one resumption, of which it has ``most_losses``. Resumptions are not taken from the retry budget,
  because workers die one at a time, whatever the traffic.
- A worker that left as planned costs nothing: it says nothing about the request, and operators plan few such moves.
- A worker that answered with an error is not asked again, and the next try needs the retry policy's consent.
- After internal errors of two workers the request itself is taken for the cause, and ends.
- Errors of the client's making, and its deadline, end the request at once.
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
