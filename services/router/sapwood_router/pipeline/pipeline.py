"""The seven stages in order, and one clean-up for every way a request can end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import grpc

from sapwood_common.errors import DeadlineExceededError, InternalError, RequestCancelledError, SapwoodError
from sapwood_common.status import row_of
from sapwood_router.admission_control import AdmissionControl, Place
from sapwood_router.context import Delta, RequestContext
from sapwood_router.detokenize_pool import DetokenizePool
from sapwood_router.embedding import Embedder
from sapwood_router.observer import RequestObserver
from sapwood_router.output_stream import OutputChunk, OutputStream
from sapwood_router.pipeline.attempts import Attempts
from sapwood_router.pipeline.prepare import prepare
from sapwood_router.pipeline.reserve import reserve
from sapwood_router.pipeline.respond import respond
from sapwood_router.policies.policy_book import PolicyBook
from sapwood_router.registry import Registry
from sapwood_router.resume import Failover
from sapwood_router.retry import RetryPolicy
from sapwood_router.token_stream import TokenStream
from sapwood_router.tokenizer_client import TokenizerClient

logger = logging.getLogger(__name__)


class Pipeline:
    """What all requests share.

    Args:
        tokenizer: Encodes prompts.
        session: Decodes tokens.
        registry: Knows the workers.
        admission: Where requests wait for one.
        policies: Choose one.
        failover: Makes each request's account of failures.
        retry: Grants retries, and counts requests for its budget.
        resume_grace: Seconds that a request whose worker was lost waits for another to come up.
        observer: Measures and traces the requests.
    """

    def __init__(
        self,
        tokenizer: TokenizerClient,
        session: DetokenizePool,
        registry: Registry,
        admission: AdmissionControl,
        policies: PolicyBook,
        retry: RetryPolicy,
        failover: Callable[[], Failover],
        resume_grace: float,
        observer: RequestObserver,
    ) -> None:
        self.tokenizer = tokenizer
        self.embedder = Embedder(tokenizer, registry, admission, policies, retry, failover, resume_grace, observer)
        self.session = session
        self.registry = registry
        self.admission = admission
        self.policies = policies
        self.retry = retry
        self.failover = failover
        self.resume_grace = resume_grace
        self.observer = observer

    def open(self, context: RequestContext) -> Run:
        """A request's run; the caller reads it with ``next`` and closes it."""
        self.retry.budget.request()
        return Run(self, context)


class Run:
    """One request under way. Owned by one task; :meth:`close` may be called from any callback of the event loop."""

    def __init__(self, pipeline: Pipeline, context: RequestContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._watch = pipeline.observer.watch(context)
        self._place: Place | None = None
        self._stream: OutputStream | None = None
        self._attempts: Attempts | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent_tokens = 0
        """In deltas; ``_relayed``: past them."""
        self._relayed = 0
        self._closed = False

    @property
    def resumptions(self) -> int:
        """How often it went on, on another worker, so far."""
        return self._context.resumptions

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
            delta = self._respond(chunk)
        except SapwoodError as error:
            self._context.error = error
            self.close()
            raise
        except Exception as error:
            self._context.error = InternalError(str(error))
            self.close()
            raise
        if delta.finish is not None:
            # Accounts are made up once the delta is on its way to the client.
            asyncio.get_running_loop().call_soon(self._finished)
        return delta

    def divert(self, ready: Callable[[], bool], sink: Callable[[Delta], None]) -> None:
        """Hands deltas over as they come, the last one excepted, instead of waking who waits in :meth:`next`.

        Args:
            ready: Whether ``sink`` takes one now.
            sink: Takes one.
        """
        stream = self._stream
        assert stream is not None, "only after the first delta"

        def take() -> bool:
            if not ready():
                return False
            sink(self._respond(stream.take()))
            return True

        stream.divert(take)

    def relay_tokens(self, write: Callable[[int], bool]) -> None:
        """Beside :meth:`divert`: where there are token ids alone, hands single ones over past everything that makes a delta.

        Args:
            write: Sends a token's id, or returns False: then it goes the other way. Must not raise.
        """
        stream, context = self._stream, self._context
        if not isinstance(stream, TokenStream):
            return
        keep, count = context.output_ids.append, self._watch.token_counter()

        def relay(token_id: int) -> bool:
            if not write(token_id):
                return False
            keep(token_id)
            self._relayed += 1
            count()
            return True

        stream.pass_on(relay)

    def _respond(self, chunk: OutputChunk) -> Delta:
        started = time.perf_counter()
        chunk.tokens += self._relayed  # which the stream has not seen
        delta = respond(self._context, chunk, self._sent_tokens + self._relayed)
        self._sent_tokens += len(delta.token_ids)
        self._watch.delta(started, len(delta.token_ids))
        return delta

    def close(self) -> None:
        """Ends the request wherever it is: worker, detokenizer and load are released now. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._attempts is not None:
            self._attempts.close()
        if self._place is not None:
            self._place.leave()
        if self._stream is not None:
            self._stream.close()
        if self._context.caller.account is not None:
            self._context.caller.account.take_output(len(self._context.output_ids))
        self._watch.close()
        self._log()
        self._context.error = None  # by its traceback it knows the context, and both would wait for the collector

    async def _start(self) -> OutputStream:
        context, pipeline = self._context, self._pipeline
        place = self._place = reserve(context, pipeline.registry, pipeline.admission)
        with self._watch.stage("prepare"):
            await prepare(context, pipeline.tokenizer)
        if self._closed:
            raise RequestCancelledError("the client left")
        stream: OutputStream
        if context.detokenize:
            stream = pipeline.session.open(context.output, whole=context.whole)
        else:
            stream = TokenStream(whole=context.whole)
        self._timer = asyncio.get_running_loop().call_at(context.deadline, self._expire, stream)
        self._attempts = Attempts(pipeline, context, stream, self._watch, place)
        self._attempts.start()
        return stream

    def _expire(self, stream: OutputStream) -> None:
        stream.fail(DeadlineExceededError("the deadline passed"))
        if self._attempts is not None:
            self._attempts.close()

    def _finished(self) -> None:
        assert self._attempts is not None
        self._attempts.finished()
        self.close()

    def _log(self) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        context = self._context
        now = time.perf_counter()
        if context.error is not None:
            status = row_of(context.error).grpc
        else:
            status = grpc.StatusCode.CANCELLED if context.usage is None else grpc.StatusCode.OK
        ttft = "-" if context.first_token is None else f"{(context.first_token - context.started) * 1000:.1f}ms"
        logger.info(
            "request=%s model=%s worker=%s reason=%s prompt=%d cached=%d completion=%d status=%s duration=%.1fms ttft=%s%s%s",
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
            f" resumptions={context.resumptions}" if context.resumptions else "",
            "" if context.error is None else f" error={context.error.message!r}",
        )


def close_all(runs: Iterable[Run]) -> None:
    """Ends several runs. May be called again."""
    for run in runs:
        run.close()
