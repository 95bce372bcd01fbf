"""Stages 2 to 6 for one request, on one worker after another until one finishes it; see ``resume.py`` for the rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Protocol

from sapwood_common.errors import InternalError, SapwoodError, UnavailableError
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.fleet.outcome import WorkerLostError
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.resume import Failover
from sapwood_router.flow.stages.acquire import acquire
from sapwood_router.flow.stages.build import build
from sapwood_router.flow.stages.dispatch import dispatch
from sapwood_router.flow.stages.execute import Execution
from sapwood_router.flow.stages.reserve import reserve
from sapwood_router.flow.stages.select import select
from sapwood_router.observe.observer import RequestWatch, Stage
from sapwood_router.request.context import FinishReason, RequestContext
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output_stream import OutputStream
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.routing.shadowed import Shadowed

logger = logging.getLogger(__name__)


class Shared(Protocol):
    """What the pipeline lends to each request."""

    registry: Registry
    admission: AdmissionControl
    policies: PolicyBook
    resume_grace: float

    def failover(self) -> Failover:
        """An account of a request's failures."""
        ...


class Attempts:
    """One request's tries. What need not wait runs where it is called, in callbacks: the usual request, which its first worker
    answers, needs no task here. :meth:`close` may be called from any callback.

    Args:
        shared: Registry, policy and rules.
        context: The prepared request.
        stream: Takes the tokens, and the error if there is no way on.
        watch: Measures.
        place: The request's, if there is one for it yet.
    """

    def __init__(
        self,
        shared: Shared,
        context: RequestContext,
        stream: OutputStream,
        watch: RequestWatch,
        place: Place | None,
    ) -> None:
        self._shared = shared
        self._context = context
        self._stream = stream
        self._watch = watch
        self._place = place
        self._failover = shared.failover()
        self._variables = copy_context()
        """Of the task that asks: what is logged and sent for the request, from whichever callback, belongs to it."""
        self._task: asyncio.Task[None] | None = None
        self._execution: Execution | None = None
        self._executing: Stage | None = None
        self._worker: Worker | None = None
        self._closed = False
        self._prompt = _pages_of(context, context.token_ids)
        self._prompt_output = 0
        """How many output tokens are part of ``_prompt``."""

    def start(self) -> None:
        """Begins the first try; the stream fails when there is no way on. To be called in the task that asks."""
        context, shared = self._context, self._shared
        try:
            context.model = shared.registry.resolve(context.model)
            if context.caller.account is not None:
                context.caller.account.take_prompt(context.prompt, len(context.token_ids))
            queueing = self._watch.stage("queue")
            queueing.begin()
            place = self._place or reserve(context, shared.registry, shared.admission)
            assert place is not None, "the model is known"
            self._place = place
            if place.ready():
                queueing.end()
                self._try(*self._choose())
            else:
                self._do(lambda: self._queue(place, queueing))
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Ends the try that is under way. May be called again."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self._place is not None:
            self._place.leave()
        if self._execution is not None:
            self._execution.close()

    def finished(self) -> None:
        """The client has the whole answer: the policy learns what the worker holds now."""
        worker = self._worker
        if worker is not None and worker.model is not None:
            new_tokens = self._context.output_ids[self._prompt_output :]
            self._policy().finished(worker.address, worker.model.page_size, self._prompt, new_tokens)

    def _choose(self) -> tuple[Worker, Choice]:
        with self._watch.stage("select"):
            return select(self._context, self._prompt, self._shared.registry, self._policy(), self._failover.refused_by)

    def _try(self, worker: Worker, choice: Choice) -> None:
        """Sends the request to the worker; :meth:`_tried` hears how that ended."""
        with self._watch.stage("acquire"):
            lease, permit = acquire(worker, choice, self._prompt, self._policy())
        assert worker.model is not None, "it was chosen for its model"
        end_tokens = worker.model.eos_token_ids | set(self._context.sampling.stop_token_ids)
        execution = Execution(self._context, self._stream, lease, permit, end_tokens, self._tried)
        self._worker, self._execution, self._executing = worker, execution, None
        self._watch.selected(choice.reason)
        try:
            with self._watch.stage("build"):
                request = build(self._context)
            with self._watch.stage("dispatch"):
                dispatch(self._context, worker, request, execution)
        except SapwoodError as error:
            execution.close(error)
        except BaseException:
            execution.close()
            raise
        else:
            self._executing = self._watch.stage("execute")
            self._executing.begin()

    def _tried(self, error: SapwoodError | None) -> None:
        if self._executing is not None:
            self._executing.end()
        worker = self._worker
        if error is not None and worker is not None and worker.model is not None:
            self._policy().failed(worker.address, worker.model.page_size, self._prompt)
        if error is not None and not self._closed:
            self._do(lambda: self._go_on(to_client_field(error, self._context.fields)))

    def _do(self, work: Callable[[], Awaitable[None]]) -> None:
        """What has to wait is a task's. One that is cancelled before its first step never asks for ``work``."""
        self._task = asyncio.get_running_loop().create_task(self._guarded(work), context=self._variables)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, SapwoodError):
            # Its frames know it: with them it would keep the request until the collector comes.
            self._stream.fail(error.with_traceback(None))
        else:
            logger.error("request %s failed", self._context.request_id, exc_info=error)
            self._stream.fail(InternalError(str(error)))

    async def _queue(self, place: Place, queueing: Stage) -> None:
        """All workers are busy: waits for its turn. What was let in once does not queue again."""
        try:
            await place.turn()
        finally:
            queueing.end()
        self._try(*self._choose())

    async def _go_on(self, error: SapwoodError) -> None:
        """After a failure: another try, if there may be one."""
        context, failed = self._context, self._worker
        assert failed is not None
        delay = self._failover.after(error, failed.address, context.deadline)
        if delay is None:
            raise error
        if self._complete():
            return
        self._watch.retried(error)
        if context.output_ids:
            context.resumptions += 1
            self._watch.resumed()
        logger.info(
            "worker %s: %s; going on elsewhere after %d tokens",
            *(failed.address, error.message, len(context.output_ids)),
        )
        await asyncio.sleep(delay)
        if len(context.output_ids) != self._prompt_output:
            self._prompt = _pages_of(context, context.token_ids + context.output_ids)
            self._prompt_output = len(context.output_ids)
        self._try(*await self._another(error))

    async def _another(self, last: SapwoodError) -> tuple[Worker, Choice]:
        """Chooses a worker; after a loss, waits for one if there is none."""
        shared, loop = self._shared, asyncio.get_running_loop()
        give_up = loop.time() + shared.resume_grace
        while True:
            changed = shared.registry.changed
            try:
                return self._choose()
            except SapwoodError as error:
                # Also: the model's last worker was removed, or those that are left have too little context.
                left = give_up - loop.time()
                if not isinstance(last, WorkerLostError) or left <= 0:
                    raise _told(last) from error  # what a worker said tells the client more than that none is left
                with contextlib.suppress(TimeoutError):  # a breaker's time passes without a change
                    await asyncio.wait_for(changed.wait(), min(left, 0.25))

    def _policy(self) -> Shadowed:
        """The model's; it is known once the request was admitted."""
        assert self._context.model is not None
        return self._shared.policies.of(self._context.model)

    def _complete(self) -> bool:
        """Whether the lost worker had nothing left to generate but to say so."""
        context = self._context
        if len(context.output_ids) < context.sampling.max_tokens:
            return False
        context.worker_finish = FinishReason.LENGTH
        self._stream.push((), end=True)
        return True


def _pages_of(context: RequestContext, token_ids: list[int]) -> PromptPages:
    return PromptPages(token_ids, context.caller.session, context.caller.cache_salt)


def _told(error: SapwoodError) -> SapwoodError:
    if isinstance(error, UnavailableError):
        error.retry_after = error.retry_after or 1.0
    return error
