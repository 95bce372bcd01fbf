"""One worker's try at a request, from its place on the worker's account to its end."""

from __future__ import annotations

from collections.abc import Callable

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InternalError, SapwoodError
from sapwood_router.fleet.circuit_breaker import Permit
from sapwood_router.fleet.outcome import Outcome, outcome_of
from sapwood_router.fleet.output import WorkerOutput
from sapwood_router.fleet.session import WorkerStream
from sapwood_router.fleet.worker import Lease


class Execution:
    """Implements ``StreamSink`` without a task of its own. Each kind of request overrides what takes the answers it asked for.

    Args:
        lease: The request's share of the worker's load; released when the try is over.
        permit: From the worker's breaker; ended by the first output, or by the failure.
        on_over: Called once, when the try is over: with None if the worker finished the request or the try was given up, else
            with what went wrong. Must not raise.
    """

    def __init__(self, lease: Lease, permit: Permit, on_over: Callable[[SapwoodError | None], None]) -> None:
        self._lease = lease
        self._permit = permit
        self._on_over: Callable[[SapwoodError | None], None] | None = on_over
        self._worker_stream: WorkerStream | None = None
        self._begun = False

    def begin(self, worker_stream: WorkerStream) -> None:
        """The request was sent."""
        self._worker_stream = worker_stream

    def token(self, token_id: int) -> None:
        self.failed(_not_asked_for())

    def output(self, output: WorkerOutput) -> None:
        self.failed(_not_asked_for())

    def vectors(self, part: worker_pb2.WorkerEmbedResponse) -> None:
        self.failed(_not_asked_for())

    def failed(self, error: SapwoodError) -> None:
        self._end(outcome_of(error), error)

    def close(self, error: SapwoodError | None = None) -> None:
        """Gives the try up because of ``error``; None: the client left. May be called again, and after its end."""
        if self._on_over is not None:
            self._end(Outcome.NEUTRAL, error)

    def _answers(self) -> None:
        """The first output has come: the prompt is computed, and the worker is well."""
        self._begun = True
        self._lease.prefilled()
        self._permit.end(Outcome.SUCCESS)

    def _end(self, outcome: Outcome, error: SapwoodError | None) -> None:
        # The callback's owner refers to this try. Keeping the callback would make a cycle that keeps the request's tokens.
        on_over, self._on_over = self._on_over, None
        if on_over is None:
            return
        self._permit.end(outcome)
        self._lease.release()
        if self._worker_stream is not None:
            self._worker_stream.close()
        on_over(error)


def _not_asked_for() -> InternalError:
    return InternalError("the worker answered what it was not asked")
