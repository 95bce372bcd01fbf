"""A request's way: prepared, tried on one worker after another until one finishes it, and written to its client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from sapwood.v1 import worker_pb2
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RequestCancelledError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.shared_bytes import SharedBytes
from sapwood_net.http2.server.turnstile import Turnstile
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.pacing.afterwards import Afterwards
from sapwood_net.pacing.heavy_work import A_FEW, HeavyWork
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.admission.fair_queue import OverloadedError
from sapwood_router.fleet.circuit_breaker import Outcome, Permit, WorkerLeftError
from sapwood_router.fleet.convert import WorkerOutput, add_pictures, pack, to_worker_request
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.flow.attempts import Attempt, Attempts, acquire
from sapwood_router.flow.cache_leases import CacheLeases
from sapwood_router.flow.client import Client
from sapwood_router.flow.disaggregation.decision import Disaggregation, Part
from sapwood_router.flow.disaggregation.handoff import EarlyPull, Timing
from sapwood_router.flow.embedding import Embedder
from sapwood_router.flow.headroom import Headroom, Pursuit
from sapwood_router.flow.prepare import cost_of, prepare, settle_model
from sapwood_router.flow.relay.relay import Relay
from sapwood_router.flow.retry import Failover, RetryPolicy
from sapwood_router.flow.select import Route, Selector
from sapwood_router.flow.sessions import SessionStore
from sapwood_router.flow.steering import RunningRequests
from sapwood_router.observe.observer import RequestObserver
from sapwood_router.request.caller import NOBODY
from sapwood_router.request.context import (
    Delta,
    Finish,
    FinishReason,
    RequestContext,
    SessionTurn,
    ToolChoice,
    Usage,
    unique_id,
)
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.objective import HELD, PREEMPTED, SHED, ShedError
from sapwood_router.request.output import Output, OutputChunk, OutputStream, TokenStream
from sapwood_router.request.tokens import MANY, pieces
from sapwood_router.request.validation import check_together, extent
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.policy_book import PolicyBook, Shadowed
from sapwood_router.tokenizer.client import LargeTexts
from sapwood_router.tokenizer.text_stream import Tokenizers
from sapwood_router.transport.held_tickets import HeldTicket

logger = logging.getLogger(__name__)

_LONG, _MANY_TOKENS = 32 * 1024, 8 * 1024
"""A prompt with at least this many characters or tokens waits for its turn: a request may have a thousand prompts."""


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
        observer: Measures, traces and logs the requests.
        sessions: Those that requests may go on with.
        leases: Keeps prompts that clients ask to keep.
        disaggregation: Decides whether prompts are computed on workers that are for that.
        headroom: Predicts which requests' objectives are met.
        seeds: Draws the seeds of requests that bring none.
        heavy: The queue of work that takes the event loop long, for all callers and APIs.
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
        leases: CacheLeases,
        disaggregation: Disaggregation,
        headroom: Headroom,
        seeds: Seeds,
        heavy: HeavyWork,
        pixels: SharedBytes,
    ) -> None:
        self.sessions = sessions
        self.leases = leases
        self.tokenizers = tokenizers
        self.registry = registry
        self.admission = admission
        self.policies = policies
        self.retry = retry
        self.failover = failover
        self.resume_grace = resume_grace
        self.disaggregation = disaggregation
        self.headroom = headroom
        self.selector = Selector(registry, policies, disaggregation)
        self.seeds = seeds
        self.observer = observer
        self.heavy = heavy
        self.pixels = pixels
        """What prepared pictures of running requests take."""
        self.large = LargeTexts()
        """Where large requests wait, so that only one at a time is in memory as numbers and text."""
        self.starts = Turnstile()
        """Where the generations of a request wait for their turn; there may be a thousand. The first one does not wait."""
        self.afterwards = Afterwards()
        """What is done after the last delta of an answer is on its way, such as telling the policy."""
        self.running = RunningRequests()
        self.embedder = Embedder(self, tokenizers, retry, observer)
        self.relay = Relay(self, retry, observer)

    async def prepare(self, context: RequestContext) -> None:
        """Checks a request and makes tokens of its prompt; raises what :func:`prepare` does."""
        settle_model(context, self.registry)
        stint = self.heavy.stint(context.caller.tenant)
        await prepare(context, self.tokenizers.of(context.model).client, self.registry, stint)

    def open(self, context: RequestContext) -> Generation:
        """A generation; the caller starts and closes it."""
        self.retry.budget.request()
        generation = Generation(self, context)
        self.running.add(generation)
        return generation

    async def open_all(self, contexts: Sequence[RequestContext]) -> list[Generation]:
        """The generations of one request, a few at a time.

        Raises:
            InvalidArgumentError: Their prompts come to too much.
        """
        check_together(contexts)
        generations: list[Generation] = []
        try:
            for context in contexts:
                if len(generations) % A_FEW == A_FEW - 1:
                    await self.heavy.turn(context.caller.tenant, goes_on=True)
                generations.append(self.open(context))
        except BaseException:
            self.close_all(generations)
            raise
        return generations

    def close_all(self, generations: Sequence[Generation]) -> None:
        """Ends the generations of one request: of very many most in later turns of the event loop. May be called again."""
        for generation in generations[:A_FEW]:
            generation.close()
        for generation in generations[A_FEW:]:
            if not generation.closed:
                self.afterwards.add(generation.close)


class PreemptedError(WorkerLeftError):
    """A request without a token yet made way for one of a higher class: it waits again."""


class Generation(Attempts):
    """One request while it runs. The next worker, if one is lost, gets the prompt and what was generated so far.

    One task starts it; any callback of the loop may call :meth:`flush` and :meth:`close`.

    Args:
        pipeline: What all requests share.
        context: The request.

    Attributes:
        context: The argument.
        closed: Whether it has ended.
    """

    def __init__(self, pipeline: Pipeline, context: RequestContext) -> None:
        super().__init__(pipeline, context.request_id, context.deadline)
        self.context = context
        self.closed = False
        self._pipeline = pipeline
        self._watch = pipeline.observer.watch(context)
        self._client: Client | None = None
        self._index = 0
        self._sent_tokens = 0
        """Tokens that the client got in deltas."""
        self._timer: asyncio.TimerHandle | None = None
        self._stream: OutputStream | None = None
        """Makes output of tokens; None: the prompt is not prepared yet."""
        self._prompt: PromptPages
        """The prompt that the next worker gets, once it is prepared."""
        self._prompt_output = 0
        """How many output tokens are part of ``_prompt``."""
        self._part = Part.WHOLE
        """Which part of the request the worker of the latest try does."""
        self._policy: Shadowed
        """The model's policy for that part; set together with it, once the request was admitted."""
        self._ticket: HeldTicket | None = None
        self._early: EarlyPull | None = None
        self._pixels = 0
        """Bytes of its pictures that are counted."""
        self._counted = False
        """Whether it counts among its adapter's requests."""
        self._timing: Timing | None = None
        """Measures what the request takes, for later decisions; None: there are none to make."""
        self._pursuit: Pursuit | None = None
        """Its part in meeting objectives; None: its model has no requests with any."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.context.caller.tenant

    @property
    def request_id(self) -> str:
        """What its client calls it."""
        return self._request_id

    # Its beginning and its end.

    async def start(self, client: Client, index: int = 0) -> None:
        """Begins. Returns once the prompt is on its way. Output is written to the client, and so are errors, which name fields as
        the client does.

        Args:
            client: Takes the deltas; whenever it is ready it gets all present ones, merged.
            index: The generation's, among those of the client.
        """
        self._client, self._index = client, index
        try:
            await self._prepare()
            if self.closed:
                raise RequestCancelledError("the client left")
            self._first_try()
        except Exception as error:
            self._end_with(error)

    def abort(self) -> None:
        """Ends the answer with what there is of it; a request that has not begun fails. To be called once."""
        stream = self._stream
        if stream is None:
            self._end_with(RequestCancelledError("the request was aborted before it began"))
        elif not (self.closed or stream.over):
            self.context.worker_finish = FinishReason.ABORT
            self.stop()
            stream.push((), end=True)

    def close(self) -> None:
        """Ends the request wherever it is: worker, place and load are released now. May be called again."""
        if self.closed:
            return
        self.closed = True
        context = self.context
        self._pipeline.running.remove(self)
        if self._counted:
            self._pipeline.registry.loras.begun(context.model or "", context.lora, -1)
        self._pipeline.pixels.release(self.tenant, self._pixels)
        if context.session is not None:
            context.session.release()
        if self._timer is not None:
            self._timer.cancel()
        self.stop()
        if self._stream is not None:
            self._stream.close()
        self._client = None  # it refers to its generations: a cycle
        if self._pursuit is not None:
            self._pursuit.close()
            self._pursuit = None
        if context.caller.account is not None:
            context.caller.account.take_output(len(context.output_ids))
        self._watch.close()
        context.error = None  # its traceback refers to the context: a cycle

    def stop(self) -> None:
        super().stop()
        self._watch.part(None)
        if self._early is not None:
            self._early.release(self._ticket)
        if self._ticket is not None:
            self._ticket.release()

    def _finished(self) -> None:
        """The client has the whole answer: the policy learns what the worker holds now."""
        worker = self._worker
        if worker is not None and worker.model is not None:
            new_tokens = self.context.output_ids[self._prompt_output :]
            self._policy.finished(worker.address, worker.model.page_size, self._prompt, new_tokens)
            if self._timing is not None:
                self._timing.ended(len(new_tokens), len(self.context.output_ids))
            if self._pursuit is not None:
                self._pursuit.ended(len(new_tokens))
        self.close()

    def _end_with(self, error: Exception) -> None:
        """The request fails: its client gets the error."""
        if not isinstance(error, SapwoodError):
            logger.exception("request %s failed", self._request_id, exc_info=error)
            error = InternalError(str(error))
        if self.closed:
            return
        if self._pursuit is not None and self._pursuit.objective is not None:
            if isinstance(error, OverloadedError):
                error = ShedError(error.message, retry_after=error.retry_after)
            if isinstance(error, ShedError):
                self._watch.pursued(SHED)
        self.context.error = error
        client = self._client
        self.close()
        if client is not None:
            # Its traceback refers to the request: a cycle that only the garbage collector would free.
            client.failed(error.with_traceback(None))

    def _fail_with(self, error: SapwoodError) -> None:
        if self._stream is not None:
            self._stream.fail(error)  # after what is there already

    def _expire(self) -> None:
        self._fail_with(DeadlineExceededError("the deadline passed"))
        self.stop()

    # Stage 1: prepare.

    async def _prepare(self) -> None:
        context, pipeline = self.context, self._pipeline
        await pipeline.running.wait(self, context.deadline)
        if self.closed:
            raise RequestCancelledError("the request was aborted")
        if self._index:
            await pipeline.starts.wait(Rank(context.caller.priority, context.caller.tenant))
        settle_model(context, pipeline.registry)
        if context.hint.prefetch:  # nothing is answered: a token is made so that all of the prompt is computed
            context.sampling = replace(context.sampling, max_tokens=1, min_tokens=0)
            context.grammar, context.tool_choice = None, ToolChoice()
        self._place = self._reserve()
        with self._watch.stage("prepare"):
            if extent(context.prompt) >= _LONG:
                await pipeline.heavy.turn(context.caller.tenant, goes_on=True)
            await pipeline.prepare(context)
            self._hold_pixels()
            if self._index:  # of a thousand prompts, lists of tokens would take 9 times as much
                context.token_ids = array("I", context.token_ids)
            if len(context.token_ids) >= _MANY_TOKENS:  # which are hashed, looked up and sent
                await pipeline.heavy.turn(context.caller.tenant, goes_on=True)
            self._prompt = pages_of(context, context.token_ids, pipeline.registry)
            if len(context.token_ids) > MANY:
                await self._look_ahead()
        if self._index:  # the prompts of many came back together
            await pipeline.starts.wait(Rank(context.caller.priority, context.caller.tenant))
        self._stream = await self._open_stream()

    def _reserve(self) -> Place | None:
        """A place in the queue; with the first one the request begins to take part in meeting objectives.

        Returns:
            None: its model is not known, or not yet.

        Raises:
            ResourceExhaustedError: It is refused.
            InvalidArgumentError: It names no model and there are several, or one that only backends have.
        """
        context, pipeline = self.context, self._pipeline
        try:
            model = pipeline.registry.resolve(context.model)
        except (NotFoundError, UnavailableError):
            return None
        if self._pursuit is None:
            came = asyncio.get_running_loop().time() - (time.perf_counter() - context.started)
            self._pursuit = pipeline.headroom.begin(model, context.caller, came, self._preempt)
        latest = math.inf if self._pursuit is None else self._pursuit.latest
        return pipeline.admission.reserve(model, context.caller, cost_of(context), context.deadline, latest)

    def _hold_pixels(self) -> None:
        """Counts the request's pictures until it ends. Raises ResourceExhaustedError if requests hold too many."""
        size = sum(len(each.pixels) for each in self.context.pictures)
        if not self.closed:
            self._pipeline.pixels.hold(self.tenant, size)
            self._pixels = size

    async def _open_stream(self) -> OutputStream:
        context = self.context
        if not context.detokenize:
            return TokenStream(whole=context.whole)
        if len(context.output.tools) >= _LONG:  # which are read
            await self._pipeline.heavy.turn(context.caller.tenant, goes_on=True)
        streams = self._pipeline.tokenizers.of(context.model).streams
        try:
            return await streams.open(context.output, context.request_id, context.deadline, whole=context.whole)
        except SapwoodError as error:
            raise to_client_field(error, context.fields) from error

    async def _look_ahead(self) -> None:
        """Hashes and packs a very long prompt piece by piece, so that no later stage has to do it in one go."""
        context, pipeline = self.context, self._pipeline
        for page_size in pipeline.registry.page_sizes(pipeline.registry.resolve(context.model)):
            for _ in self._prompt.hash_steps(page_size, MANY):
                await pipeline.heavy.turn(context.caller.tenant, goes_on=True)
        packed = context.packed = []
        for piece in pieces(context.token_ids):
            packed.append(pack(piece))
            await pipeline.heavy.turn(context.caller.tenant, goes_on=True)

    # Stage 2: select.

    def _first_try(self) -> None:
        """Begins the first try; the stream fails when there is no way on. To be called in the task that asks."""
        context, shared, stream = self.context, self._pipeline, self._stream
        assert stream is not None, "it was prepared"
        self._timer = asyncio.get_running_loop().call_at(context.deadline, self._expire)
        stream.follow(self.flush)
        try:
            context.model = shared.registry.resolve(context.model)
            if context.lora:
                shared.registry.loras.asked(context.model, context.lora)
                shared.registry.loras.begun(context.model, context.lora, 1)
                self._counted = True
            self._check_objective()
            if context.caller.account is not None:
                context.caller.account.take_prompt(context.prompt, len(context.token_ids))
            if (costs := shared.disaggregation.costs_of(context.model)) is not None:
                self._timing = Timing(costs, time.monotonic)
            self._watch.begin("queue")
            place = self._place or self._reserve()
            assert place is not None, "the model is known"
            self._begin(place)
        except Exception as error:
            self._fail(error)

    def _admitted(self) -> None:
        self._watch.end("queue")
        if self._place is not None and self._place.held and not self.context.objective:
            self.context.objective = HELD
            self._watch.made_way(HELD)

    def _check_objective(self) -> None:
        """Raises ShedError if the request has an objective that no worker is predicted to meet."""
        pursuit, pipeline = self._pursuit, self._pipeline
        if pursuit is None or pursuit.objective is None:
            return
        demand, tokens = self._demand(), len(self._prompt.token_ids)
        try:
            workers, only_some = pipeline.selector.first_workers(demand, self._prompt)
            if only_some and not pursuit.narrow(workers, self._held_by(workers), tokens):
                workers, _ = pipeline.selector.first_workers(demand, self._prompt, others=True)
        except (UnavailableError, InvalidArgumentError):
            return  # the choice will say what is wrong
        pursuit.check(workers, self._held_by(workers), tokens)

    def _held_by(self, workers: Sequence[Worker]) -> Mapping[str, tuple[int, float]]:
        """By address how many of the prompt's tokens the workers hold, as far as the policy knows."""
        policy = self._pipeline.policies.of(self._demand().model)
        return policy.explain([worker.view() for worker in workers], self._prompt)

    def _narrow(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """The workers that are predicted to meet the request's objective, and those of higher classes beside it."""
        assert self._pursuit is not None, "it is asked of requests that take part"
        return self._pursuit.narrow(workers, self._held_by(workers), len(self._prompt.token_ids))

    def _preempt(self) -> None:
        """Takes the request, which has no token yet, from its worker; it waits for its turn again."""
        if self._attempt is not None and not self._stopped:
            self.context.objective = PREEMPTED
            self._watch.made_way(PREEMPTED)
            self._attempt.close(PreemptedError("the request made way for one of a higher class"))

    async def _go_on(self, error: SapwoodError) -> None:
        if not isinstance(error, PreemptedError):
            await super()._go_on(error)
            return
        self._watch.begin("queue")
        place = self._place = self._reserve()
        assert place is not None, "the model is known"
        if place.ready():
            self._admitted()
            self._try(*self._choose())
        else:
            await self._queue(place)

    def _waited(self) -> None:
        try:
            self._check_objective()
        except ShedError:
            self._pipeline.admission.pump()  # another may have its place
            raise

    def _choose(self) -> tuple[Worker, Choice]:
        with self._watch.stage("select"):
            if self._ticket is not None and not self._ticket.good:
                self._ticket = None
            route = self._begun_early() or self._next_route()
            self._part = route.part
            self._policy = self._pipeline.policies.of(self._demand().model, decode=route.part is Part.DECODE)
            self.context.worker, self.context.reason = route.choice.address, route.choice.reason
            return route.worker, route.choice

    def _begun_early(self) -> Route | None:
        """The decode worker that has read the prompt's pages while they were computed, if there is one and it can go on."""
        if self._ticket is None:
            return None
        early, self._early = self._early, None
        chosen = None if early is None else early.chosen(self._demand())
        return None if chosen is None else Route(*chosen, Part.DECODE)

    def _next_route(self) -> Route:
        """Where the request goes next: to a worker that can use its ticket's pages, if it has one, else to where it begins."""
        selector, demand = self._pipeline.selector, self._demand()
        if self._ticket is not None:
            with contextlib.suppress(UnavailableError, InvalidArgumentError):
                return selector.decode(demand, self._prompt, self._ticket.message.fingerprint, self._session_at)
            return selector.decode(demand, self._prompt, b"", self._session_at)
        left = self.context.sampling.max_tokens - len(self.context.output_ids)
        narrow = None if self._pursuit is None or self._pursuit.is_free else self._narrow
        route = selector.begin(demand, self._prompt, left, self._session_at, narrow=narrow)
        if route.decision is not None and route.decision.estimates:
            self._watch.weighed(pair=route.decision.disaggregated)
        return route

    @property
    def _session_at(self) -> str:
        session = self.context.session
        return "" if session is None else session.worker

    def _demand(self) -> Demand:
        context = self.context
        model = self._pipeline.registry.resolve(context.model)
        return Demand(
            model, len(self._prompt.token_ids), context.fields.prompt, refused_by=self._refused_by, lora=context.lora
        )

    # Stages 3 to 5: acquire, build, dispatch.

    def _acquire(self, worker: Worker, choice: Choice) -> Attempt:
        lacking = len(self._prompt.token_ids) - choice.cached_tokens
        if self._part is Part.DECODE:  # it reads the prompt's pages and computes almost nothing of the prompt
            choice = replace(choice, cached_tokens=len(self._prompt.token_ids))
        with self._watch.stage("acquire"):
            hands_off = self._part is Part.PREFILL and not self.context.continuations
            lease, permit = acquire(worker, choice, self._prompt, self._policy, self.tenant, hands_off=hands_off)
        assert worker.model is not None, "it was chosen for its model"
        self._watch.selected(choice.reason)
        end_tokens = (
            frozenset[int]()
            if self.context.output.include_stop
            else worker.model.eos_token_ids | set(self.context.sampling.stop_token_ids)
        )
        if self._timing is not None:
            self._timing.sent(worker, self._part, lacking)
        if self._pursuit is not None and self._part is not Part.DECODE:
            self._pursuit.sent(worker, lacking, may_return=self._part is Part.WHOLE and not self.context.output_ids)
        assert self._stream is not None, "it was prepared"
        return GenerationAttempt(self, self._stream, end_tokens, lease, permit)

    def _send(self, worker: Worker, attempt: Attempt) -> None:
        with self._watch.stage("build"):
            ticket = None if self._ticket is None else self._ticket.message
            source = lora_source(self.context, self._pipeline.registry)
            hands_off = self._part is Part.PREFILL and not self.context.continuations
            request, more = build(self.context, hand_off=hands_off, ticket=ticket, source=source)
        with self._watch.stage("dispatch"):
            attempt.send(request, worker, self._deadline, more)
        if self._part is Part.PREFILL:
            self._watch.part("prefill")
        self._watch.begin("execute")

    # Stage 6: execute. What a try says, and what follows from it.

    def answers(self) -> None:
        """The worker's first token has come."""
        if self._part is Part.DECODE:
            self._watch.part("decode")
        if self._timing is not None:
            self._timing.answers()
        if self._pursuit is not None:
            self._pursuit.answers()
            self._pipeline.admission.pump()  # who is held may go now

    def tried(self, error: SapwoodError | None) -> None:
        self._watch.end("execute")
        if error is None:
            if self._part is Part.DECODE:
                self._watch.part(None)
            super().tried(None)
            return
        self._watch.part(None)
        if self._pursuit is not None:
            self._pursuit.left()
        if self._early is not None:
            self._early.release()
        worker = self._worker
        if worker is not None and worker.model is not None:
            self._policy.failed(worker.address, worker.model.page_size, self._prompt)
        super().tried(to_client_field(error, self.context.fields))

    def _goes_on(self, error: SapwoodError) -> bool:
        context = self.context
        if len(context.output_ids) >= context.sampling.max_tokens:
            # The lost worker had only to say that it was at its end.
            context.worker_finish = FinishReason.LENGTH
            assert self._stream is not None, "it was prepared"
            self._stream.push((), end=True)
            return False
        self._watch.retried(error)
        if context.output_ids:
            context.resumptions += 1
            self._watch.resumed()
        self._extend_prompt()
        return True

    def announced(self, ticket: HeldTicket) -> None:
        """Pages of the prompt can be read: a decode worker is to begin."""
        if self.context.pictures:
            ticket.release()  # an announcement names tokens alone; a later ticket names all pages
            return
        if self._early is None:
            try:
                route = self._pipeline.selector.decode(
                    self._demand(), self._prompt, ticket.message.fingerprint, self._session_at
                )
            except (UnavailableError, InvalidArgumentError):
                ticket.release()  # a later ticket names all pages
                return
            self._early = EarlyPull(route.worker, route.choice)
        self._early.announce(ticket, self._prompt, self.context.caller.cache_salt)

    def handed_off(self, ticket: HeldTicket) -> None:
        """The prompt is computed: a decode worker is to go on."""
        if self._early is not None:
            self._early.release(ticket)
        if self._stopped:
            ticket.release()
            return
        self._ticket = ticket
        self._watch.part("transfer")
        if self._timing is not None:
            self._timing.handed_off()
        self.context.handoffs += 1
        self._watch.handed_off()
        self._extend_prompt()
        self._do(self._take_over)

    async def _take_over(self) -> None:
        self._try(*await self._another(None))

    def _extend_prompt(self) -> None:
        """Appends what was generated to the prompt that the next worker gets."""
        context = self.context
        if len(context.output_ids) != self._prompt_output:
            tokens = [*context.token_ids, *context.output_ids]
            self._prompt = pages_of(context, tokens, self._pipeline.registry)
            self._prompt_output = len(context.output_ids)

    # Stage 7: respond.

    def flush(self) -> None:
        """Writes the output that is there, if the client is ready."""
        stream, client, context = self._stream, self._client, self.context
        if stream is None or client is None:
            return
        try:
            while stream.ready and context.usage is None and not self.closed:
                if not client.writable():
                    client.postpone(self._index)
                    return
                delta = self._respond(stream.take())
                finish = delta.finish
                if finish is not None and context.session is not None and not context.hint.prefetch:
                    if self._timer is not None:
                        self._timer.cancel()
                    self._do(partial(self._commit, context.session, delta, client))
                else:
                    self._give(client, delta)
        except Exception as error:  # fails this request only, not the others whose output came in the same message
            self._end_with(error)

    def _give(self, client: Client, delta: Delta) -> None:
        """The client gets a delta; the last one ends the request."""
        context = self.context
        client.take(delta)
        if delta.finish is not None:
            if context.hint.keep_seconds or context.hint.demote:
                self._pipeline.leases.take(context)
            # Metrics and shares are counted after the delta is on its way to the client.
            self._pipeline.afterwards.add(self._finished)

    def _respond(self, chunk: OutputChunk) -> Delta:
        """The client's next delta of new output: the output, its tokens, and in the last one the usage."""
        started, context = time.perf_counter(), self.context
        if context.first_token is None:
            context.first_token = started
        if context.hint.keep_seconds and not context.written_tokens:
            context.written_tokens = self._pipeline.leases.writes(context)
        if not context.parallel_tool_calls:
            chunk.output.tool_calls = [call for call in chunk.output.tool_calls if call.index == 0]
        if context.healed and chunk.output.text:
            chunk.output.text = _without_healed(context, chunk.output.text)
        finish = finish_of(context, chunk) if chunk.ended else None
        if finish is not None and self._pursuit is not None:
            self._judge(self._pursuit, finish.usage.completion_tokens)
        start, end = self._sent_tokens, chunk.tokens if finish is None else finish.usage.completion_tokens
        token_ids = context.output_ids[start:end].tolist()
        logprobs = context.logprobs[start:end] if context.logprobs else ()
        text_tokens = (chunk.tokens if chunk.tokens < end else end) - start
        if context.hint.prefetch:
            chunk.output, token_ids, logprobs, text_tokens = Output(), [], (), 0
            if finish is not None:
                context.usage = replace(finish.usage, completion_tokens=0, reasoning_tokens=0)
                finish = Finish(FinishReason.LENGTH, context.usage)
        self._sent_tokens += len(token_ids)
        self._watch.delta(started, len(token_ids), chunk.output)
        return Delta(chunk.output, token_ids, finish, logprobs, text_tokens, self._index)

    def _judge(self, pursuit: Pursuit, tokens: int) -> None:
        """Says whether the answer, which is complete, met its objective."""
        context = self.context
        assert context.first_token is not None, "it was set with the first output"
        each = (time.perf_counter() - context.first_token) / (tokens - 1) if tokens > 1 else 0.0
        if outcome := pursuit.outcome(context.first_token - context.started, each):
            context.objective = outcome
            self._watch.pursued(outcome)

    def client_is_slow(self) -> None:
        """The worker waits for the client to read."""
        if self._pursuit is not None:
            self._pursuit.client_is_slow()

    async def _commit(self, session: SessionTurn, delta: Delta, client: Client) -> None:
        """Keeps a session's turn, before the client can ask again; then the client gets the end of its answer."""
        try:
            await self._keep(session)
            if not self.closed:
                self._give(client, delta)
        except Exception as error:
            self._end_with(error)

    async def _keep(self, session: SessionTurn) -> None:
        context, usage = self.context, self.context.usage
        assert usage is not None, "the answer is complete"
        held = array("I", context.token_ids)
        held.extend(context.output_ids[: usage.completion_tokens])
        await session.commit(
            held,
            usage.prompt_tokens,
            usage.cached_tokens,
            context.public_model,
            context.worker,
            context.caller.cache_salt,
            context.lora,
        )


class GenerationAttempt(Attempt):
    """One worker's try at a generation. Tokens go to the stream, no faster than the client reads.

    Args:
        generation: The request; its context's ``output_ids``, ``worker_finish`` and ``cached_tokens`` are filled.
        stream: Takes the tokens.
        end_tokens: Tokens that end a generation and stand for no text.
        lease, permit: See Attempt.
    """

    def __init__(
        self, generation: Generation, stream: OutputStream, end_tokens: Collection[int], lease: Lease, permit: Permit
    ) -> None:
        super().__init__(generation, lease, permit)
        self._generation = generation
        self._context = generation.context
        self._stream = stream
        self._end_tokens = end_tokens
        self._held = False

    def output(self, token_ids: Sequence[int], more: WorkerOutput | None = None) -> None:
        context, stream = self._context, self._stream
        if token_ids and not self._begun:
            # A client that takes the answer whole is sent nothing at its first token: that moment is noted here.
            if context.whole and context.first_token is None:
                context.first_token = time.perf_counter()
            self._answers()
            self._generation.answers()
        if more is not None and more.announced is not None:
            self._generation.announced(more.announced)
            if not token_ids:
                return
        if more is not None and more.weight_version:
            context.weight_versions.append((len(context.output_ids), more.weight_version))
        context.output_ids.extend(token_ids)
        if more is not None:
            self._note(more)
            if more.ticket is not None:
                stream.push(token_ids)
                self._end(Outcome.SUCCESS, None)
                self._generation.handed_off(more.ticket)
                return
            if more.finish is not None:
                # A worker knows no stop strings: it stops at an end token, which is part of the tokens but not of the text, or
                # where the grammar allows no more.
                stopped = more.finish is FinishReason.STOP and len(token_ids) > 0 and token_ids[-1] in self._end_tokens
                stream.push(token_ids[:-1] if stopped else token_ids, end=True)
                self._end(Outcome.SUCCESS, None)
                return
        if stream.push(token_ids):
            self._hold()

    def _note(self, more: WorkerOutput) -> None:
        """Takes what comes with the tokens."""
        context = self._context
        first = not (context.resumptions or context.handoffs)
        if more.cached_tokens is not None and first:
            context.cached_tokens = more.cached_tokens
        context.lora_digest = more.lora_digest or context.lora_digest
        context.logprobs.extend(more.logprobs)
        if more.prompt_logprobs and first:
            context.prompt_logprobs = more.prompt_logprobs
        if more.finish is not None:
            context.worker_finish = more.finish
            context.accepted_prediction_tokens = more.accepted_prediction_tokens
            context.rejected_prediction_tokens = more.rejected_prediction_tokens

    def _hold(self) -> None:
        """The worker keeps what it generates until the client has read some."""
        if not self._held and self._worker_stream is not None:
            self._held = True
            self._generation.client_is_slow()
            self._worker_stream.pause()
            self._stream.call_when_room(self._resume)

    def _resume(self) -> None:
        self._held = False
        if self._worker_stream is not None:
            self._worker_stream.resume()


def _without_healed(context: RequestContext, text: str) -> str:
    """More of an answer's text, without what it repeats of the prompt."""
    count = min(len(context.healed), len(text))
    repeated, context.healed = context.healed[:count], context.healed[count:]
    return text.removeprefix(repeated)


def lora_source(context: RequestContext, registry: Registry) -> worker_pb2.LoraSource | None:
    """What the next worker has to know of a request's adapter; None: there is none.

    A worker that continues the text of another one must have weights with the same digest.
    """
    if not context.lora:
        return None
    lora = registry.loras.find(context.model or "", context.lora)
    source = worker_pb2.LoraSource(digest=context.lora_digest if context.output_ids or context.handoffs else b"")
    if lora is not None:
        source.path, source.version = lora.path, lora.version
    return source


def build(
    context: RequestContext,
    *,
    hand_off: bool = False,
    ticket: worker_pb2.HandoffTicket | None = None,
    source: worker_pb2.LoraSource | None = None,
) -> tuple[worker_pb2.WorkerGenerateRequest, Sequence[bytes]]:
    """The message for the next worker, with the prompt, the tokens generated so far, and how many are left to generate.

    Args:
        context: The request; its tries are counted.
        hand_off: Whether the worker computes the prompt and one token only.
        ticket: For the prompt's pages.
        source: Of the request's adapter.

    Returns:
        The message, and the tokens of a very long prompt in the form of :func:`~sapwood_router.fleet.convert.pack`; the message
        then has none. Each try has an id of its own, because the worker of the previous try may not know yet that it is over.
    """
    sampling, done = context.sampling, len(context.output_ids)
    if done:
        sampling = replace(sampling, max_tokens=sampling.max_tokens - done)
    if context.handoffs and context.prompt_logprobs:  # the first worker has told them
        sampling = replace(sampling, prompt_logprobs=None)
    token_ids, more = context.token_ids, context.packed
    if done:
        token_ids, more = [*token_ids, *context.output_ids], ()
    if len(token_ids) > MANY:
        more = more or [pack(piece) for piece in pieces(token_ids)]
        token_ids, context.packed = [], ()
    context.attempts += 1
    request_id = context.worker_request_id if context.attempts == 1 else unique_id(context.request_id)
    request = to_worker_request(request_id, token_ids, sampling)
    if done:
        request.output_tokens = done
    caller = context.caller
    if caller is not NOBODY:
        request.priority, request.tenant, request.cache_salt = caller.priority, caller.tenant, caller.cache_salt
    if context.pictures:
        add_pictures(request, context.pictures)
    for node in context.continuations:
        request.continuations.add(parent=None if node.parent < 0 else node.parent, token_ids=node.token_ids)
    if context.compiled_grammar:
        request.grammar.compiled = context.compiled_grammar
    if hand_off:
        request.hand_off = True
    if ticket is not None:
        request.ticket.CopyFrom(ticket)
    if context.lora:
        request.lora_name = context.lora
        if source is not None:
            request.lora_source.CopyFrom(source)
    return request, more


def finish_of(context: RequestContext, chunk: OutputChunk) -> Finish:
    """Why a generation ended whose last output this is. Fills ``usage``.

    Raises:
        InternalError: It was not over.
    """
    stop_token = None
    if chunk.stop_match is not None:
        reason, tokens = FinishReason.STOP, chunk.tokens
    elif context.worker_finish is not None:
        reason, tokens = context.worker_finish, len(context.output_ids)
        last = context.output_ids[-1] if tokens else -1
        if reason is FinishReason.STOP and last in context.sampling.stop_token_ids and last not in context.own_ends:
            stop_token = last
    else:
        raise InternalError("a stream ended that was not over")
    context.usage = Usage(
        len(context.token_ids),
        tokens,
        context.cached_tokens,
        context.accepted_prediction_tokens,
        context.rejected_prediction_tokens,
        min(chunk.reasoning_tokens, tokens),
        context.written_tokens,
    )
    return Finish(reason, context.usage, chunk.stop_match, stop_token)


def pages_of(context: RequestContext, token_ids: Sequence[int], registry: Registry) -> PromptPages:
    """A prompt of the request, as policies see it."""
    caller, spans = context.caller, [each.span for each in context.pictures]
    weights = registry.weights_of(context.model or "")
    if not context.lora:
        return PromptPages(token_ids, caller.session, caller.cache_salt, pictures=spans, weights=weights)
    lora = registry.loras.find(context.model or "", context.lora)
    digest = b"" if lora is None else lora.digest
    return PromptPages(token_ids, caller.session, caller.cache_salt, context.lora, digest, spans, weights)
