"""Stages 2 to 6 for one generation, on one worker after another until one finishes it."""

from __future__ import annotations

from sapwood_common.errors import SapwoodError
from sapwood_router.admission.control import Place
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.attempts import Attempts, Shared
from sapwood_router.flow.stages.acquire import acquire
from sapwood_router.flow.stages.build import build
from sapwood_router.flow.stages.dispatch import dispatch
from sapwood_router.flow.stages.execute import Generating
from sapwood_router.flow.stages.execution import Execution
from sapwood_router.flow.stages.reserve import reserve
from sapwood_router.flow.stages.select import select
from sapwood_router.observe.observer import RequestWatch, Stage
from sapwood_router.request.context import FinishReason, RequestContext
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output_stream import OutputStream
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.shadowed import Shadowed


class GenerationAttempts(Attempts):
    """A generation's tries: the next worker gets the prompt and what was generated so far.

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
        super().__init__(shared, context.request_id, context.deadline)
        self._context = context
        self._stream = stream
        self._watch = watch
        self._place = place
        self._executing: Stage | None = None
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
            self._begin(place, queueing.end)
        except Exception as error:
            self._fail(error)

    def finished(self) -> None:
        """The client has the whole answer: the policy learns what the worker holds now."""
        worker = self._worker
        if worker is not None and worker.model is not None:
            new_tokens = self._context.output_ids[self._prompt_output :]
            self._policy().finished(worker.address, worker.model.page_size, self._prompt, new_tokens)

    def _choose(self) -> tuple[Worker, Choice]:
        with self._watch.stage("select"):
            return select(self._context, self._prompt, self._shared.registry, self._policy(), self._failover.refused_by)

    def _acquire(self, worker: Worker, choice: Choice) -> Execution:
        with self._watch.stage("acquire"):
            lease, permit = acquire(worker, choice, self._prompt, self._policy())
        assert worker.model is not None, "it was chosen for its model"
        self._executing = None
        self._watch.selected(choice.reason)
        end_tokens = worker.model.eos_token_ids | set(self._context.sampling.stop_token_ids)
        return Generating(self._context, self._stream, end_tokens, lease, permit, self._tried)

    def _send(self, worker: Worker, execution: Execution) -> None:
        with self._watch.stage("build"):
            request = build(self._context)
        with self._watch.stage("dispatch"):
            dispatch(request, worker, self._context.deadline, execution)
        self._executing = self._watch.stage("execute")
        self._executing.begin()

    def _tried(self, error: SapwoodError | None) -> None:
        if self._executing is not None:
            self._executing.end()
        worker = self._worker
        if error is not None and worker is not None and worker.model is not None:
            self._policy().failed(worker.address, worker.model.page_size, self._prompt)
        super()._tried(None if error is None else to_client_field(error, self._context.fields))

    def _goes_on(self, error: SapwoodError) -> bool:
        context = self._context
        if (
            len(context.output_ids) >= context.sampling.max_tokens
        ):  # the lost worker had only to say that it was at its end
            context.worker_finish = FinishReason.LENGTH
            self._stream.push((), end=True)
            return False
        self._watch.retried(error)
        if context.output_ids:
            context.resumptions += 1
            self._watch.resumed()
        if len(context.output_ids) != self._prompt_output:
            self._prompt = _pages_of(context, context.token_ids + context.output_ids)
            self._prompt_output = len(context.output_ids)
        return True

    def _fail_with(self, error: SapwoodError) -> None:
        self._stream.fail(error)

    def _policy(self) -> Shadowed:
        """The model's; it is known once the request was admitted."""
        assert self._context.model is not None
        return self._shared.policies.of(self._context.model)


def _pages_of(context: RequestContext, token_ids: list[int]) -> PromptPages:
    return PromptPages(token_ids, context.caller.session, context.caller.cache_salt)
