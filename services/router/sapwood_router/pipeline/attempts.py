"""Stages 2 to 6 for one request, on one worker after another until one finishes it; see ``resume.py`` for the rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from sapwood_common.errors import InternalError, SapwoodError, UnavailableError
from sapwood_router.admission_control import AdmissionControl
from sapwood_router.context import FinishReason, RequestContext
from sapwood_router.field_names import to_client_field
from sapwood_router.observer import RequestWatch
from sapwood_router.outcome import WorkerLostError
from sapwood_router.output_stream import OutputStream
from sapwood_router.pipeline.acquire import acquire
from sapwood_router.pipeline.build import build
from sapwood_router.pipeline.dispatch import dispatch
from sapwood_router.pipeline.execute import Execution
from sapwood_router.pipeline.select import select
from sapwood_router.policies.base import Choice, Policy, PromptPages
from sapwood_router.policies.policy_book import PolicyBook
from sapwood_router.registry import Registry
from sapwood_router.resume import Failover
from sapwood_router.worker import Worker

_USUAL_TOKENS = 256
"""What a request that sets no max_tokens is taken to generate, where shares are counted."""

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
    """One request's tries. :meth:`run` is its driving task; :meth:`close` may be called from any callback.

    Args:
        shared: Registry, policy and rules.
        context: The prepared request.
        stream: Takes the tokens, and the error if there is no way on.
        watch: Measures.
    """

    def __init__(self, shared: Shared, context: RequestContext, stream: OutputStream, watch: RequestWatch) -> None:
        self._shared = shared
        self._context = context
        self._stream = stream
        self._watch = watch
        self._failover = shared.failover()
        self._execution: Execution | None = None
        self._worker: Worker | None = None
        self._prompt = _pages_of(context, context.token_ids)
        self._prompt_output = 0
        """How many output tokens are part of ``_prompt``."""

    async def run(self) -> None:
        """Tries until a worker finishes the generation; failing that, fails the stream."""
        try:
            await self._until_finished()
        except SapwoodError as error:
            self._stream.fail(error)
        except Exception as error:
            logger.exception("request %s failed", self._context.request_id)
            self._stream.fail(InternalError(str(error)))

    def close(self) -> None:
        """Ends the try that is under way."""
        if self._execution is not None:
            self._execution.close()

    def finished(self) -> None:
        """The client has the whole answer: the policy learns what the worker holds now."""
        worker = self._worker
        if worker is not None and worker.model is not None:
            new_tokens = self._context.output_ids[self._prompt_output :]
            self._policy().finished(worker.address, worker.model.page_size, self._prompt, new_tokens)

    async def _until_finished(self) -> None:
        context = self._context
        error: SapwoodError | None = None
        while True:
            worker, choice = await self._select(error)
            error = await self._try(worker, choice)
            if error is None:
                return
            delay = self._failover.after(error, worker.address, context.deadline)
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
                *(worker.address, error.message, len(context.output_ids)),
            )
            await asyncio.sleep(delay)

    async def _try(self, worker: Worker, choice: Choice) -> SapwoodError | None:
        with self._watch.stage("acquire"):
            lease, permit = acquire(worker, choice, self._prompt, self._policy())
        assert worker.model is not None, "it was chosen for its model"
        end_tokens = worker.model.eos_token_ids | set(self._context.sampling.stop_token_ids)
        execution = self._execution = Execution(self._context, self._stream, lease, permit, end_tokens)
        self._worker = worker
        self._watch.selected(choice.reason)
        try:
            with self._watch.stage("build"):
                request = build(self._context)
            with self._watch.stage("dispatch"):
                dispatch(self._context, worker, request, execution)
            with self._watch.stage("execute"):
                error = await execution.wait()
        except SapwoodError as failure:
            error = failure
        finally:
            execution.close()
        return None if error is None else to_client_field(error, self._context.fields)

    async def _select(self, last: SapwoodError | None) -> tuple[Worker, Choice]:
        """Chooses a worker; after a loss, waits for one if there is none."""
        context, shared = self._context, self._shared
        if len(context.output_ids) != self._prompt_output:
            self._prompt = _pages_of(context, context.token_ids + context.output_ids)
            self._prompt_output = len(context.output_ids)
        if last is None:
            await self._admit()
        loop = asyncio.get_running_loop()
        give_up = loop.time() + shared.resume_grace
        while True:
            changed = shared.registry.changed
            try:
                with self._watch.stage("select"):
                    return select(context, self._prompt, shared.registry, self._policy(), self._failover.refused_by)
            except UnavailableError as error:
                if last is None:
                    raise
                left = give_up - loop.time()
                if not isinstance(last, WorkerLostError) or left <= 0:
                    raise _told(last) from error  # what a worker said tells the client more than that none is left
                with contextlib.suppress(TimeoutError):  # a breaker's time passes without a change
                    await asyncio.wait_for(changed.wait(), min(left, 0.25))

    def _policy(self) -> Policy:
        """The model's; it is known once the request was admitted."""
        assert self._context.model is not None
        return self._shared.policies.of(self._context.model)

    async def _admit(self) -> None:
        """Waits for its turn where all workers are busy. What was let in once does not queue again."""
        context = self._context
        context.model = self._shared.registry.resolve(context.model)
        if context.caller.account is not None:
            context.caller.account.take_prompt(len(context.token_ids))
        cost = len(context.token_ids) + (context.sampling.max_tokens or _USUAL_TOKENS)
        with self._watch.stage("queue"):
            await self._shared.admission.admit(context.model, context.caller, cost, context.deadline)

    def _complete(self) -> bool:
        """Whether the lost worker had nothing left to generate but to say so."""
        context, most = self._context, self._context.sampling.max_tokens
        if most is None or len(context.output_ids) < most:
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
