"""A request's tries: on one worker after another until one answers it; see ``resume.py`` for the rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Protocol

from sapwood_common.errors import InternalError, SapwoodError, UnavailableError
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.fleet.outcome import WorkerLostError
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.decision import Disaggregation
from sapwood_router.flow.resume import Failover
from sapwood_router.flow.stages.execution import Execution
from sapwood_router.flow.stages.select import Selector
from sapwood_router.routing.policies.base import Choice
from sapwood_router.routing.policy_book import PolicyBook

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


class Attempts(ABC):
    """One request's tries. A request that its first worker answers, as most are, needs no task here: all of it runs in callbacks.
    A task is made only for what has to wait. :meth:`close` may be called from any callback.

    Args:
        shared: Registry, policy and rules.
        request_id: For the log.
        deadline: On the event loop's clock. No try is granted after it; the owner then closes this.
    """

    def __init__(self, shared: Shared, request_id: str, deadline: float) -> None:
        self._shared = shared
        self._request_id = request_id
        self._deadline = deadline
        self._failover = shared.failover()
        self._variables = copy_context()
        """The context variables (request id, trace) of the task that asked: the tasks made here log and send with them."""
        self._place: Place | None = None
        self._task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        """The worker of the latest try."""
        self._execution: Execution | None = None
        self._closed = False

    @abstractmethod
    def _choose(self) -> tuple[Worker, Choice]:
        """Chooses the worker for the next try. Raises SapwoodError: there is none."""

    @abstractmethod
    def _acquire(self, worker: Worker, choice: Choice) -> Execution:
        """Begins a try: counts it in the worker's load. The try calls :meth:`_tried` when it ends."""

    @abstractmethod
    def _send(self, worker: Worker, execution: Execution) -> None:
        """Sends the request. Raises SapwoodError: it cannot be sent there, or any more."""

    @abstractmethod
    def _goes_on(self, error: SapwoodError) -> bool:
        """Prepares the next try, which was granted after ``error``. Returns False if nothing is left to be asked for."""

    @abstractmethod
    def _fail_with(self, error: SapwoodError) -> None:
        """Ends the request with ``error``: no further try is granted."""

    def close(self) -> None:
        """Ends the try that is under way. May be called again."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self._place is not None:
            self._place.leave()
        if self._execution is not None:
            self._execution.close()

    def _begin(self, place: Place, on_turn: Callable[[], None] = lambda: None) -> None:
        """Makes the first try as soon as the request may choose; ``on_turn`` is called when its wait is over."""
        self._place = place
        if place.ready():
            on_turn()
            self._try(*self._choose())
        else:
            self._do(lambda: self._queue(place, on_turn))

    def _try(self, worker: Worker, choice: Choice) -> None:
        self._worker = worker
        execution = self._execution = self._acquire(worker, choice)
        try:
            self._send(worker, execution)
        except SapwoodError as error:
            execution.close(error)
        except BaseException:
            execution.close()
            raise

    def _tried(self, error: SapwoodError | None) -> None:
        """A try is over: with None if the worker answered or the try was given up."""
        if error is not None and not self._closed:
            self._do(lambda: self._go_on(error))

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

    async def _queue(self, place: Place, on_turn: Callable[[], None]) -> None:
        """All workers are busy: waits for its turn. A request queues only before its first try."""
        try:
            await place.turn()
        finally:
            on_turn()
        self._try(*self._choose())

    async def _go_on(self, error: SapwoodError) -> None:
        """Makes another try after a failure, if one is allowed."""
        failed = self._worker
        assert failed is not None
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
                    raise _told(
                        last or error
                    ) from error  # what a worker said tells the client more than that none is left
                with contextlib.suppress(TimeoutError):  # breakers half-open by time alone, without setting ``changed``
                    await asyncio.wait_for(changed.wait(), min(left, 0.25))


def _told(error: SapwoodError) -> SapwoodError:
    if isinstance(error, UnavailableError):
        error.retry_after = error.retry_after or 1.0
    return error
