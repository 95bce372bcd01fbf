"""The seven stages in order, with retries before the first token and one clean-up for every way a request can end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.status import row_of
from sapwood_router.context import Delta, RequestContext
from sapwood_router.detokenize_session import DetokenizeSession
from sapwood_router.detokenize_stream import DetokenizeStream
from sapwood_router.observer import RequestObserver
from sapwood_router.pipeline.acquire import acquire
from sapwood_router.pipeline.build import build
from sapwood_router.pipeline.dispatch import Dispatched, dispatch
from sapwood_router.pipeline.execute import execute
from sapwood_router.pipeline.prepare import prepare
from sapwood_router.pipeline.respond import respond
from sapwood_router.pipeline.select import select
from sapwood_router.policies.base import Policy, PromptPages
from sapwood_router.registry import Registry
from sapwood_router.tokenizer_client import TokenizerClient
from sapwood_router.worker import Lease, Worker

logger = logging.getLogger(__name__)

_RETRIED = (UnavailableError, ResourceExhaustedError)
"""Errors of one worker that another may not have."""


class Pipeline:
    """What all requests share.

    Args:
        tokenizer: Encodes prompts.
        session: Decodes tokens.
        registry: Knows the workers.
        policy: Chooses one.
        lost: Told of a worker that went away, and how it showed.
        observer: Measures and traces the requests.
    """

    def __init__(
        self,
        tokenizer: TokenizerClient,
        session: DetokenizeSession,
        registry: Registry,
        policy: Policy,
        lost: Callable[[Worker, str], None],
        observer: RequestObserver,
    ) -> None:
        self.tokenizer = tokenizer
        self.session = session
        self.registry = registry
        self.policy = policy
        self.lost = lost
        self.observer = observer

    def open(self, context: RequestContext) -> Run:
        """A request's run; the caller reads it with ``next`` and closes it."""
        return Run(self, context)


class Run:
    """One request under way. Owned by one task; :meth:`close` may be called from any callback of the event loop."""

    def __init__(self, pipeline: Pipeline, context: RequestContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._watch = pipeline.observer.watch(context)
        self._lease: Lease | None = None
        self._worker: Worker | None = None
        self._prompt: PromptPages | None = None
        self._dispatched: Dispatched | None = None
        self._stream: DetokenizeStream | None = None
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent_tokens = 0
        self._closed = False

    async def next(self) -> Delta | None:
        """The next delta, merged from all that is ready; None after the last.

        Raises:
            SapwoodError: The request failed; its field is spelled as the client does.
        """
        if self._context.usage is not None:
            return None
        try:
            if self._stream is None:
                self._stream = await self._start()
            chunk = await self._stream.read()
            delta = respond(self._context, chunk, self._sent_tokens)
        except SapwoodError as error:
            self._context.error = error
            self.close()
            raise
        except Exception as error:
            self._context.error = InternalError(str(error))
            self.close()
            raise
        self._sent_tokens += len(delta.token_ids)
        self._watch.delta(len(delta.token_ids))
        if delta.finish is not None:
            self._finished()
            self.close()
        return delta

    def close(self) -> None:
        """Ends the request wherever it is: worker, detokenizer and load are released now. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None and self._context.worker_finish is None:
            self._pump.cancel()
        if self._dispatched is not None and self._context.worker_finish is None:
            self._dispatched.call.cancel()
        if self._stream is not None:
            self._stream.close()
        if self._lease is not None:
            self._lease.release()
        self._watch.close()
        self._log()

    async def _start(self) -> DetokenizeStream:
        context, pipeline = self._context, self._pipeline
        with self._watch.stage("prepare"):
            await prepare(context, pipeline.tokenizer)
        self._prompt = PromptPages(context.token_ids)
        worker, lease, dispatched = await self._reach_worker(self._prompt)
        if self._closed:  # the client left while the worker answered
            dispatched.call.cancel()
            raise RequestCancelledError("the client left")
        self._dispatched = dispatched
        stream = pipeline.session.open(context.output)
        self._pump = asyncio.ensure_future(
            self._execute(dispatched, stream, lease, lambda problem: pipeline.lost(worker, problem))
        )
        self._timer = asyncio.get_running_loop().call_at(context.deadline, self._expire)
        return stream

    async def _reach_worker(self, prompt: PromptPages) -> tuple[Worker, Lease, Dispatched]:
        context, pipeline = self._context, self._pipeline
        request = build(context)
        tried: dict[str, SapwoodError] = {}
        while True:
            try:
                with self._watch.stage("select"):
                    worker, choice = select(context, prompt, pipeline.registry, pipeline.policy, tried)
            except UnavailableError as error:
                # What a worker said tells the client more than that none is left.
                raise next(reversed(tried.values()), error) from error
            lease = self._lease = acquire(worker, choice, prompt, pipeline.policy)
            self._worker = worker
            self._watch.selected(choice.reason)
            try:
                with self._watch.stage("dispatch"):
                    return worker, lease, await dispatch(context, worker, request)
            except BaseException as error:
                lease.release()
                if not isinstance(error, _RETRIED):
                    raise
                tried[worker.address] = error
                self._watch.retried(error)
                if isinstance(error, UnavailableError):
                    pipeline.lost(worker, error.message)
                    error.retry_after = error.retry_after or 1.0
                logger.info("worker %s: %s; trying another", worker.address, error.message)

    async def _execute(
        self, dispatched: Dispatched, stream: DetokenizeStream, lease: Lease, lost: Callable[[str], None]
    ) -> None:
        with self._watch.stage("execute"):
            await execute(self._context, dispatched, stream, lease, lost)

    def _expire(self) -> None:
        if self._stream is not None:
            self._stream.fail(DeadlineExceededError("the deadline passed"))
        if self._pump is not None:
            self._pump.cancel()

    def _finished(self) -> None:
        worker, prompt = self._worker, self._prompt
        assert worker is not None and prompt is not None
        if worker.model is not None:
            self._pipeline.policy.finished(worker.address, worker.model.page_size, prompt, self._context.output_ids)

    def _log(self) -> None:
        context = self._context
        now = time.perf_counter()
        if context.error is not None:
            status = row_of(context.error).grpc
        else:
            status = grpc.StatusCode.CANCELLED if context.usage is None else grpc.StatusCode.OK
        ttft = "-" if context.first_token is None else f"{(context.first_token - context.started) * 1000:.1f}ms"
        logger.info(
            "request=%s model=%s worker=%s reason=%s prompt=%d cached=%d completion=%d status=%s duration=%.1fms ttft=%s%s",
            context.request_id,
            context.model or "-",
            context.worker,
            context.reason,
            len(context.token_ids),
            context.cached_tokens,
            len(context.output_ids) if context.usage is None else context.usage.completion_tokens,
            status.name,
            (now - context.started) * 1000,
            ttft,
            "" if context.error is None else f" error={context.error.message!r}",
        )
