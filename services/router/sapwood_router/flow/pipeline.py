"""The seven stages in order, and one clean-up for every way a request can end."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Sequence

from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import DeadlineExceededError, InternalError, RequestCancelledError, SapwoodError
from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.pacing.afterwards import Afterwards
from sapwood_net.pacing.heavy_work import A_FEW, HeavyWork
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.fleet.convert import pack
from sapwood_router.fleet.registry import Registry
from sapwood_router.flow.client import Client
from sapwood_router.flow.disaggregation.decision import Disaggregation
from sapwood_router.flow.embedding import Embedder
from sapwood_router.flow.generation import GenerationAttempts, pages_of
from sapwood_router.flow.relay.relay import Relay
from sapwood_router.flow.resume import Failover
from sapwood_router.flow.retry import RetryPolicy
from sapwood_router.flow.running import RunningRequests
from sapwood_router.flow.sessions import SessionStore
from sapwood_router.flow.stages.prepare import prepare
from sapwood_router.flow.stages.reserve import reserve
from sapwood_router.flow.stages.respond import respond
from sapwood_router.flow.stages.select import Selector
from sapwood_router.flow.token_stream import TokenStream
from sapwood_router.observe.observer import RequestObserver
from sapwood_router.request.context import Delta, FinishReason, RequestContext, Usage
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output_stream import OutputChunk, OutputStream
from sapwood_router.request.session import SessionTurn
from sapwood_router.request.tokens import MANY, pieces
from sapwood_router.request.validation import check_together, extent
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.tokenizer.large_texts import LargeTexts
from sapwood_router.tokenizer.tokenizers import Tokenizers

logger = logging.getLogger(__name__)

_LONG, _MANY_TOKENS = 32 * 1024, 8 * 1024
"""Characters and tokens of a prompt from which on it waits for its turn: a request may have a thousand of them."""


class Pipeline:
    """What all requests share.

    Args:
        tokenizers: Encode prompts and decode tokens.
        registry: Knows the workers.
        admission: Where requests wait for one.
        policies: Choose one.
        failover: Makes each request's account of failures.
        retry: Grants retries, and counts requests for its budget.
        resume_grace: Seconds that a request whose worker was lost waits for another to come up.
        observer: Measures and traces the requests.
        sessions: Those that requests may go on with.
        disaggregation: Decides whether prompts are computed on workers that are for that.
        seeds: Draws the seeds of requests that bring none.
        heavy: Where what takes the loop long waits for its turn, whoever asked and however it came.
    """

    def __init__(
        self,
        tokenizers: Tokenizers,
        registry: Registry,
        admission: AdmissionControl,
        policies: PolicyBook,
        retry: RetryPolicy,
        failover: Callable[[], Failover],
        resume_grace: float,
        observer: RequestObserver,
        sessions: SessionStore,
        disaggregation: Disaggregation,
        seeds: Seeds,
        heavy: HeavyWork,
    ) -> None:
        self.sessions = sessions
        self.tokenizers = tokenizers
        self.registry = registry
        self.admission = admission
        self.policies = policies
        self.retry = retry
        self.failover = failover
        self.resume_grace = resume_grace
        self.disaggregation = disaggregation
        self.selector = Selector(registry, policies, disaggregation)
        self.seeds = seeds
        self.observer = observer
        self.heavy = heavy
        self.large = LargeTexts()
        """Where large requests wait of which no more than one is to be in memory as numbers and text."""
        self.starts = Turnstile()
        """Where the runs of a request, of which there may be a thousand, wait for their turn; the first one does not."""
        self.afterwards = Afterwards()
        """What is done after the last delta of an answer is on its way, such as telling the policy."""
        self.running = RunningRequests()
        self.embedder = Embedder(self, tokenizers, retry, observer)
        self.relay = Relay(self, retry, observer)

    async def prepare(self, context: RequestContext) -> None:
        """Checks a request and makes tokens of its prompt; raises what :func:`prepare` does."""
        stint = self.heavy.stint(context.caller.tenant)
        await prepare(context, self.tokenizers.of(context.model).client, self.registry, stint)

    def open(self, context: RequestContext) -> Run:
        """A run; the caller starts and closes it."""
        self.retry.budget.request()
        run = Run(self, context)
        self.running.add(run)
        return run

    async def open_all(self, contexts: Sequence[RequestContext]) -> list[Run]:
        """The runs of one request, a few at a time.

        Raises:
            InvalidArgumentError: Their prompts come to too much.
        """
        check_together(contexts)
        runs: list[Run] = []
        try:
            for context in contexts:
                if len(runs) % A_FEW == A_FEW - 1:
                    await self.heavy.turn(context.caller.tenant, goes_on=True)
                runs.append(self.open(context))
        except BaseException:
            self.close_all(runs)
            raise
        return runs

    def close_all(self, runs: Sequence[Run]) -> None:
        """Ends the runs of one request: of very many most in later turns of the event loop. May be called again."""
        for run in runs[:A_FEW]:
            run.close()
        for run in runs[A_FEW:]:
            if not run.closed:
                self.afterwards.add(run.close)


class Run:
    """One request while it runs. One task starts it; any callback of the loop may call :meth:`flush` and :meth:`close`."""

    def __init__(self, pipeline: Pipeline, context: RequestContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._watch = pipeline.observer.watch(context)
        self._line = pipeline.observer.log.open(context)
        self._place: Place | None = None
        self._stream: OutputStream | None = None
        self._attempts: GenerationAttempts | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._client: Client | None = None
        self._index = 0
        self._sent_tokens = 0
        """Tokens that the client got in deltas."""
        self._closed = False

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._context.caller.tenant

    @property
    def request_id(self) -> str:
        """What its client calls it."""
        return self._context.request_id

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    @property
    def resumptions(self) -> int:
        """How often it went on, on another worker, so far."""
        return self._context.resumptions

    async def start(self, client: Client, index: int = 0) -> None:
        """Begins. Returns once the prompt is on its way. Output is written to the client, and so are errors, which name fields as
        the client does.

        Args:
            client: Takes the deltas, merged from all that is there whenever it is ready.
            index: The run's, among those of the client.
        """
        self._client, self._index = client, index
        try:
            await self._start()
        except Exception as error:
            self._fail(error)

    def flush(self) -> None:
        """Writes the output that is there, if the client is ready."""
        stream, client = self._stream, self._client
        if stream is None or client is None:
            return
        try:
            while not self._closed and self._context.usage is None and stream.ready and client.ready(self._index):
                delta = self._respond(stream.take())
                self._sent_tokens += len(delta.token_ids)
                if delta.finish is not None and self._context.session is not None:
                    self._commit(self._context.session, delta.finish.usage)  # before the client can ask again
                client.take(delta)
                if delta.finish is not None:
                    # Metrics and shares are counted after the delta is on its way to the client.
                    self._pipeline.afterwards.add(self._finished)
        except Exception as error:  # fails this request only, not the others whose output came in the same message
            self._fail(error)

    def abort(self) -> None:
        """Ends the answer with what there is of it; a request that has not begun fails. To be called once."""
        stream, attempts = self._stream, self._attempts
        if stream is None or attempts is None:
            self._fail(RequestCancelledError("the request was aborted before it began"))
        elif not (self._closed or stream.over):
            self._context.worker_finish = FinishReason.ABORT
            attempts.close()
            stream.push((), end=True)

    def _commit(self, session: SessionTurn, usage: Usage) -> None:
        context = self._context
        held = array("I", context.token_ids)
        held.extend(context.output_ids[: usage.completion_tokens])
        session.commit(
            held,
            usage.prompt_tokens,
            usage.cached_tokens,
            context.model or "",
            context.worker,
            context.caller.cache_salt,
        )

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, SapwoodError):
            logger.exception("request %s failed", self._context.request_id, exc_info=error)
            error = InternalError(str(error))
        if self._closed:
            return
        self._context.error = error
        client = self._client
        self.close()
        if client is not None:
            # Its traceback refers to the request: a cycle that only the garbage collector would free.
            client.failed(error.with_traceback(None))

    def _respond(self, chunk: OutputChunk) -> Delta:
        started = time.perf_counter()
        delta = respond(self._context, chunk, self._sent_tokens)
        delta.index = self._index
        self._watch.delta(started, len(delta.token_ids))
        self._line.said(delta.output)
        return delta

    def close(self) -> None:
        """Ends the request wherever it is: worker, detokenizer and load are released now. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._pipeline.running.remove(self)
        if self._context.session is not None:
            self._context.session.release()
        if self._timer is not None:
            self._timer.cancel()
        if self._attempts is not None:
            self._attempts.close()
        if self._place is not None:
            self._place.leave()
        if self._stream is not None:
            self._stream.close()
        self._client = None  # it refers to its runs: a cycle
        if self._context.caller.account is not None:
            self._context.caller.account.take_output(len(self._context.output_ids))
        self._watch.close()
        self._line.end()
        self._context.error = None  # its traceback refers to the context: a cycle

    async def _start(self) -> None:
        context, pipeline = self._context, self._pipeline
        await pipeline.running.wait(self, context.deadline)
        if self._closed:
            raise RequestCancelledError("the request was aborted")
        if self._index:
            await pipeline.starts.wait(Rank(context.caller.priority, context.caller.tenant))
        place = self._place = reserve(context, pipeline.registry, pipeline.admission)
        with self._watch.stage("prepare"):
            if extent(context.prompt) >= _LONG:
                await pipeline.heavy.turn(context.caller.tenant, goes_on=True)
            await pipeline.prepare(context)
            if self._index:  # of a thousand prompts, lists of tokens would take 9 times as much
                context.token_ids = array("I", context.token_ids)
            if len(context.token_ids) >= _MANY_TOKENS:  # which are hashed, looked up and sent
                await pipeline.heavy.turn(context.caller.tenant, goes_on=True)
            pages = await self._look_ahead() if len(context.token_ids) > MANY else None
        if self._index:  # the prompts of many came back together
            await pipeline.starts.wait(Rank(context.caller.priority, context.caller.tenant))
        stream = await self._open_stream()
        if self._closed:
            raise RequestCancelledError("the client left")
        self._timer = asyncio.get_running_loop().call_at(context.deadline, self._expire, stream)
        self._attempts = GenerationAttempts(pipeline, context, stream, self._watch, place, pages)
        self._stream = stream
        stream.follow(self.flush)
        self._attempts.start()

    async def _open_stream(self) -> OutputStream:
        context = self._context
        if not context.detokenize:
            return TokenStream(whole=context.whole)
        if len(context.output.tools) >= _LONG:  # which are read
            await self._pipeline.heavy.turn(context.caller.tenant, goes_on=True)
        streams = self._pipeline.tokenizers.of(context.model).streams
        try:
            return await streams.open(context.output, context.request_id, context.deadline, whole=context.whole)
        except SapwoodError as error:
            raise to_client_field(error, context.fields) from error

    async def _look_ahead(self) -> PromptPages:
        """Hashes and packs a very long prompt piece by piece, so that no later stage has to do it in one go."""
        context, pipeline = self._context, self._pipeline
        pages = pages_of(context, context.token_ids)
        for page_size in pipeline.registry.page_sizes(pipeline.registry.resolve(context.model)):
            for _ in pages.hash_steps(page_size, MANY):
                await pipeline.heavy.turn(context.caller.tenant, goes_on=True)
        packed = context.packed = []
        for piece in pieces(context.token_ids):
            packed.append(pack(piece))
            await pipeline.heavy.turn(context.caller.tenant, goes_on=True)
        return pages

    def _expire(self, stream: OutputStream) -> None:
        stream.fail(DeadlineExceededError("the deadline passed"))
        if self._attempts is not None:
            self._attempts.close()

    def _finished(self) -> None:
        assert self._attempts is not None
        self._attempts.finished()
        self.close()
