"""A request's tries: on one worker after another until one answers it; see ``retry.py`` for the rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from typing import Protocol

from sapwood.v1 import worker_pb2
from sapwood_common.errors import DeadlineExceededError, InternalError, SapwoodError, UnavailableError
from sapwood_common.telemetry.logs import traceparent_var
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.fleet.circuit_breaker import Outcome, Permit, WorkerLostError, outcome_of
from sapwood_router.fleet.convert import WorkerOutput
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.session import WorkerRequest, WorkerStream
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.flow.disaggregation.decision import Disaggregation
from sapwood_router.flow.retry import Failover
from sapwood_router.flow.select import Selector
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.policy_book import PolicyBook, Shadowed

logger = logging.getLogger(__name__)


class Shared(Protocol):
    """What the pipeline lends to each request."""

    registry: Registry
    admission: AdmissionControl
    policies: PolicyBook
    resume_grace: float
    disaggregation: Disaggregation
    selector: Selector

    def failover(self) -> Failover:
        """An account of a request's failures."""
        ...


class Attempt:
    """One worker's try at a request, from its place on the worker's account to its end, without a task of its own.

    Implements ``StreamSink``. Each kind of request overrides the methods that take its answers.

    Args:
        owner: The request; it learns of the end.
        lease: The request's share of the worker's load; released when the try is over.
        permit: From the worker's breaker; ended by the first output, or by the failure.
    """

    def __init__(self, owner: Attempts, lease: Lease, permit: Permit) -> None:
        self._owner = owner
        self._lease = lease
        self._permit = permit
        self._worker_stream: WorkerStream | None = None
        self._begun = False
        self._over = False

    def send(self, request: WorkerRequest, worker: Worker, deadline: float, more: Sequence[bytes] = ()) -> None:
        """Sends a request, with ``more`` of it, over the worker's session, with the time it has left and the trace it is part of.

        Raises:
            UnavailableError: The session has ended.
            DeadlineExceededError: The request's time is over.
        """
        timeout = deadline - asyncio.get_running_loop().time()
        if timeout <= 0:
            raise DeadlineExceededError("the deadline passed before a worker was called")
        if worker.session is None:
            raise UnavailableError(f"worker {worker.address} is not connected", retry_after=1.0)
        if (traceparent := traceparent_var.get()) is not None:
            request.traceparent = traceparent
        self._worker_stream = worker.session.open(request, timeout, self, more)

    def output(self, token_ids: Sequence[int], more: WorkerOutput | None = None) -> None:
        self.failed(_not_asked_for())

    def vectors(self, part: worker_pb2.WorkerEmbedResponse) -> None:
        self.failed(_not_asked_for())

    def failed(self, error: SapwoodError) -> None:
        self._end(outcome_of(error), error)

    def close(self, error: SapwoodError | None = None) -> None:
        """Gives the try up because of ``error``; None: the client left. May be called again, and after its end."""
        self._end(Outcome.NEUTRAL, error)

    def _answers(self) -> None:
        """The first output has come: the prompt is computed, and the worker is well."""
        self._begun = True
        self._lease.prefilled()
        self._permit.end(Outcome.SUCCESS)

    def _end(self, outcome: Outcome, error: SapwoodError | None) -> None:
        if self._over:
            return
        self._over = True
        self._permit.end(outcome)
        self._lease.release()
        if self._worker_stream is not None:
            self._worker_stream.close()
        self._owner.tried(error)


class Attempts(ABC):
    """One request's tries. A request that its first worker answers, as most are, needs no task here: all of it runs in callbacks.
    A task is made only for what has to wait. :meth:`stop` may be called from any callback.

    Args:
        shared: Registry, policy and rules.
        request_id: For the log.
        deadline: On the event loop's clock. No try is granted after it; the owner then stops this.
    """

    def __init__(self, shared: Shared, request_id: str, deadline: float) -> None:
        self._shared = shared
        self._deadline = deadline
        self._request_id = request_id
        self._failover: Failover | None = None
        """The account of failures, once there is one."""
        self._variables = copy_context()
        """The context variables (request id, trace) of the task that asked: the tasks made here log and send with them."""
        self._place: Place | None = None
        self._task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        """The worker of the latest try."""
        self._attempt: Attempt | None = None
        """The try under way. It refers to this: no cycle is left once it is over."""
        self._stopped = False

    @abstractmethod
    def _choose(self) -> tuple[Worker, Choice]:
        """Chooses the worker for the next try. Raises SapwoodError: there is none."""

    @abstractmethod
    def _acquire(self, worker: Worker, choice: Choice) -> Attempt:
        """Begins a try: counts it in the worker's load."""

    @abstractmethod
    def _send(self, worker: Worker, attempt: Attempt) -> None:
        """Sends the request. Raises SapwoodError: it cannot be sent there, or any more."""

    @abstractmethod
    def _goes_on(self, error: SapwoodError) -> bool:
        """Prepares the next try, which was granted after ``error``. Returns False if nothing is left to be asked for."""

    @abstractmethod
    def _fail_with(self, error: SapwoodError) -> None:
        """Ends the request with ``error``: no further try is granted."""

    def _admitted(self) -> None:  # noqa: B027 - not every request measures it
        """The wait for a worker is over."""

    def _waited(self) -> None:  # noqa: B027 - not every request can wait too long
        """It is its turn. Raises SapwoodError: it has waited in vain."""

    def stop(self) -> None:
        """Ends the try that is under way, and makes no other. May be called again."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
        if self._place is not None:
            self._place.leave()
        if self._attempt is not None:
            self._attempt.close()

    def tried(self, error: SapwoodError | None) -> None:
        """The try is over: with None if the worker answered or the try was given up. Must not raise."""
        self._attempt = None
        if error is not None and not self._stopped:
            self._do(lambda: self._go_on(error))

    @property
    def _refused_by(self) -> frozenset[str] | set[str]:
        """Workers that are not asked again."""
        return frozenset() if self._failover is None else self._failover.refused_by

    def _begin(self, place: Place) -> None:
        """Makes the first try as soon as the request may choose."""
        self._place = place
        if place.ready():
            self._admitted()
            self._try(*self._choose())
        else:
            self._do(lambda: self._queue(place))

    def _try(self, worker: Worker, choice: Choice) -> None:
        self._worker = worker
        attempt = self._attempt = self._acquire(worker, choice)
        try:
            self._send(worker, attempt)
        except SapwoodError as error:
            attempt.close(error)
        except BaseException:
            attempt.close()
            raise

    def _do(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs ``work``, which has to wait, in a task. The task makes the coroutine, so that a task that is cancelled before its
        first step leaves no coroutine that was never awaited.
        """
        self._task = asyncio.get_running_loop().create_task(self._guarded(work), context=self._variables)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, SapwoodError):
            # Its traceback refers to frames that refer to the request: a cycle, which only the garbage collector would free.
            self._fail_with(error.with_traceback(None))
        else:
            logger.error("request %s failed", self._request_id, exc_info=error)
            self._fail_with(InternalError(str(error)))

    async def _queue(self, place: Place) -> None:
        """All workers are busy: waits for its turn. A request queues only before its first try."""
        try:
            await place.turn()
        finally:
            self._admitted()
        self._waited()
        self._try(*self._choose())

    async def _go_on(self, error: SapwoodError) -> None:
        """Makes another try after a failure, if one is allowed."""
        failed = self._worker
        assert failed is not None
        if self._failover is None:
            self._failover = self._shared.failover()
        delay = self._failover.after(error, failed.address, self._deadline)
        if delay is None:
            raise error
        if not self._goes_on(error):
            return
        logger.info("worker %s: %s; going on elsewhere", failed.address, error.message)
        await asyncio.sleep(delay)
        self._try(*await self._another(error))

    async def _another(self, last: SapwoodError | None) -> tuple[Worker, Choice]:
        """Chooses a worker for a further try. Waits up to ``resume_grace`` for one if the last was lost or (None) answered."""
        shared, loop = self._shared, asyncio.get_running_loop()
        give_up = loop.time() + shared.resume_grace
        while True:
            changed = shared.registry.changed
            try:
                return self._choose()
            except SapwoodError as error:
                # Also: the model's last worker was removed, or those that are left have too little context.
                left = give_up - loop.time()
                if not isinstance(last, WorkerLostError | None) or left <= 0:
                    # A worker's error tells the client more than an error that no worker is left.
                    raise _with_delay(last or error) from error
                with contextlib.suppress(TimeoutError):  # breakers half-open by time alone, without setting ``changed``
                    await asyncio.wait_for(changed.wait(), min(left, 0.25))


def acquire(
    worker: Worker, choice: Choice, prompt: PromptPages, policy: Shadowed, tenant: str = "", *, hands_off: bool = False
) -> tuple[Lease, Permit]:
    """Counts a request on its worker, before anything is awaited: the next choice sees it. Tells the policy of the placement.
    The caller releases the lease, and ends the permit of the worker's breaker.

    Args:
        worker: The worker that was chosen.
        choice: Why.
        prompt: The request's.
        policy: Learns of it.
        tenant: Whose request it is.
        hands_off: Whether the worker only computes the prompt.
    """
    assert worker.model is not None
    permit = worker.breaker.begin()
    policy.placed(worker.address, worker.model.page_size, prompt)
    lacking = max(1, len(prompt.token_ids) - choice.cached_tokens)
    return worker.lease(lacking, tenant, hands_off=hands_off), permit


def _with_delay(error: SapwoodError) -> SapwoodError:
    if isinstance(error, UnavailableError):
        error.retry_after = error.retry_after or 1.0
    return error


def _not_asked_for() -> InternalError:
    return InternalError("the worker answered what it was not asked")
