"""Stages 2 to 6 for one generation, on one worker after another until one finishes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from msgspec.structs import replace

from sapwood_common.errors import InvalidArgumentError, SapwoodError, UnavailableError
from sapwood_router.admission.control import Place
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.attempts import Attempts, Shared
from sapwood_router.flow.disaggregation.decision import Part
from sapwood_router.flow.disaggregation.early_pull import EarlyPull
from sapwood_router.flow.disaggregation.timing import Timing
from sapwood_router.flow.stages.acquire import acquire
from sapwood_router.flow.stages.build import build
from sapwood_router.flow.stages.dispatch import dispatch
from sapwood_router.flow.stages.execute import Generating
from sapwood_router.flow.stages.execution import Execution
from sapwood_router.flow.stages.reserve import reserve
from sapwood_router.flow.stages.select import Route
from sapwood_router.observe.observer import RequestWatch, Stage
from sapwood_router.observe.pair_parts import PairPart, PairParts
from sapwood_router.request.context import FinishReason, RequestContext
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output_stream import OutputStream
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.shadowed import Shadowed
from sapwood_router.transport.held_tickets import HeldTicket


class GenerationAttempts(Attempts):
    """A generation's tries: the next worker gets the prompt and what was generated so far.

    Args:
        shared: Registry, policy and rules.
        context: The prepared request.
        stream: Takes the tokens, and the error if there is no way on.
        watch: Measures.
        place: The request's, if there is one for it yet.
        pages: Its prompt, if it was looked at before.
    """

    def __init__(
        self,
        shared: Shared,
        context: RequestContext,
        stream: OutputStream,
        watch: RequestWatch,
        place: Place | None,
        pages: PromptPages | None,
    ) -> None:
        super().__init__(shared, context.request_id, context.deadline)
        self._context = context
        self._stream = stream
        self._watch = watch
        self._place = place
        self._executing: Stage | None = None
        self._prompt = pages or pages_of(context, context.token_ids)
        self._part = Part.WHOLE
        """Which part of the request the worker of the latest try does."""
        self._policy: Shadowed
        """The model's policy for that part; set together with it, once the request was admitted."""
        self._ticket: HeldTicket | None = None
        self._early: EarlyPull | None = None
        self._parts: PairParts | None = None
        """Times prefill, transfer and decode of a request that is handed on; None: it is not."""
        self._timing: Timing | None = None
        """Measures what the request takes, for later decisions; None: there are none to make."""
        self._prompt_output = 0
        """How many output tokens are part of ``_prompt``."""

    def start(self) -> None:
        """Begins the first try; the stream fails when there is no way on. To be called in the task that asks."""
        context, shared = self._context, self._shared
        try:
            context.model = shared.registry.resolve(context.model)
            if context.caller.account is not None:
                context.caller.account.take_prompt(context.prompt, len(context.token_ids))
            if (costs := shared.disaggregation.costs_of(context.model)) is not None:
                self._timing = Timing(costs, time.monotonic)
            queueing = self._watch.stage("queue")
            queueing.begin()
            place = self._place or reserve(context, shared.registry, shared.admission)
            assert place is not None, "the model is known"
            self._begin(place, queueing.end)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        super().close()
        if self._parts is not None:
            self._parts.end()
        if self._early is not None:
            self._early.release(self._ticket)
        if self._ticket is not None:
            self._ticket.release()

    def finished(self) -> None:
        """The client has the whole answer: the policy learns what the worker holds now."""
        worker = self._worker
        if worker is not None and worker.model is not None:
            new_tokens = self._context.output_ids[self._prompt_output :]
            self._policy.finished(worker.address, worker.model.page_size, self._prompt, new_tokens)
            if self._timing is not None:
                self._timing.ended(len(new_tokens), len(self._context.output_ids))

    def _choose(self) -> tuple[Worker, Choice]:
        with self._watch.stage("select"):
            if self._ticket is not None and not self._ticket.good:
                self._ticket = None
            route = self._begun_early() or self._next_route()
            self._part = route.part
            self._policy = self._shared.policies.of(self._demand().model, decode=route.part is Part.DECODE)
            self._context.worker, self._context.reason = route.choice.address, route.choice.reason
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
        selector, demand = self._shared.selector, self._demand()
        if self._ticket is not None:
            with contextlib.suppress(UnavailableError, InvalidArgumentError):
                return selector.decode(demand, self._prompt, self._ticket.message.fingerprint, self._session_at)
            return selector.decode(demand, self._prompt, b"", self._session_at)
        left = self._context.sampling.max_tokens - len(self._context.output_ids)
        route = selector.begin(demand, self._prompt, left, self._session_at)
        if route.decision is not None and route.decision.estimates:
            self._watch.weighed(pair=route.decision.disaggregated)
        return route

    @property
    def _session_at(self) -> str:
        session = self._context.session
        return "" if session is None else session.worker

    def _demand(self) -> Demand:
        context = self._context
        model = self._shared.registry.resolve(context.model)
        refused_by = self._failover.refused_by
        return Demand(model, len(self._prompt.token_ids), context.fields.prompt, refused_by=refused_by)

    def _acquire(self, worker: Worker, choice: Choice) -> Execution:
        lacking = len(self._prompt.token_ids) - choice.cached_tokens
        if self._part is Part.DECODE:  # it reads the prompt's pages and computes almost nothing of the prompt
            choice = replace(choice, cached_tokens=len(self._prompt.token_ids))
        with self._watch.stage("acquire"):
            hands_off = self._part is Part.PREFILL
            tenant = self._context.caller.tenant
            lease, permit = acquire(worker, choice, self._prompt, self._policy, tenant, hands_off=hands_off)
        assert worker.model is not None, "it was chosen for its model"
        self._executing = None
        self._watch.selected(choice.reason)
        end_tokens = (
            frozenset[int]()
            if self._context.output.include_stop
            else worker.model.eos_token_ids | set(self._context.sampling.stop_token_ids)
        )
        if self._timing is not None:
            self._timing.sent(worker, self._part, lacking)
        return Generating(
            self._context,
            self._stream,
            end_tokens,
            lease,
            permit,
            self._tried,
            self._announced,
            self._handed_off,
            None if self._timing is None and self._part is not Part.DECODE else self._answers,
        )

    def _answers(self) -> None:
        """The worker's first token has come."""
        if self._part is Part.DECODE:
            self._begin_part("decode")
        if self._timing is not None:
            self._timing.answers()

    def _begin_part(self, part: PairPart) -> None:
        if self._parts is None:
            self._parts = self._watch.pair_parts()
        self._parts.begin(part)

    def _send(self, worker: Worker, execution: Execution) -> None:
        with self._watch.stage("build"):
            ticket = None if self._ticket is None else self._ticket.message
            request, more = build(self._context, hand_off=self._part is Part.PREFILL, ticket=ticket)
        with self._watch.stage("dispatch"):
            dispatch(request, worker, self._context.deadline, execution, more)
        if self._part is Part.PREFILL:
            self._begin_part("prefill")
        self._executing = self._watch.stage("execute")
        self._executing.begin()

    def _tried(self, error: SapwoodError | None) -> None:
        if self._executing is not None:
            self._executing.end()
        if self._parts is not None and (error is not None or self._part is Part.DECODE):
            self._parts.end()
        if error is not None and self._early is not None:
            self._early.release()
        worker = self._worker
        if error is not None and worker is not None and worker.model is not None:
            self._policy.failed(worker.address, worker.model.page_size, self._prompt)
        super()._tried(None if error is None else to_client_field(error, self._context.fields))

    def _goes_on(self, error: SapwoodError) -> bool:
        context = self._context
        if len(context.output_ids) >= context.sampling.max_tokens:
            # The lost worker had only to say that it was at its end.
            context.worker_finish = FinishReason.LENGTH
            self._stream.push((), end=True)
            return False
        self._watch.retried(error)
        if context.output_ids:
            context.resumptions += 1
            self._watch.resumed()
        self._extend_prompt()
        return True

    def _announced(self, ticket: HeldTicket) -> None:
        """Pages of the prompt can be read: a decode worker is to begin."""
        if self._early is None:
            try:
                route = self._shared.selector.decode(
                    self._demand(), self._prompt, ticket.message.fingerprint, self._session_at
                )
            except (UnavailableError, InvalidArgumentError):
                ticket.release()  # a later ticket names all pages
                return
            self._early = EarlyPull(route.worker, route.choice)
        self._early.announce(ticket, self._prompt, self._context.caller.cache_salt)

    def _handed_off(self, ticket: HeldTicket) -> None:
        """The prompt is computed: a decode worker is to go on."""
        if self._early is not None:
            self._early.release(ticket)
        if self._closed:
            ticket.release()
            return
        self._ticket = ticket
        self._begin_part("transfer")
        if self._timing is not None:
            self._timing.handed_off()
        self._context.handoffs += 1
        self._watch.handed_off()
        self._extend_prompt()
        self._do(self._take_over)

    async def _take_over(self) -> None:
        self._try(*await self._another(None))

    def _extend_prompt(self) -> None:
        """Appends what was generated to the prompt that the next worker gets."""
        context = self._context
        if len(context.output_ids) != self._prompt_output:
            self._prompt = pages_of(context, [*context.token_ids, *context.output_ids])
            self._prompt_output = len(context.output_ids)

    def _fail_with(self, error: SapwoodError) -> None:
        self._stream.fail(error)


def pages_of(context: RequestContext, token_ids: Sequence[int]) -> PromptPages:
    """A prompt of the request, as policies see it."""
    return PromptPages(token_ids, context.caller.session, context.caller.cache_salt)
