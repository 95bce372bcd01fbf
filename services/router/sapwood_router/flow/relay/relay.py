"""Requests to models that backends have: each is given to one backend after another until one answers, and ends with one status.

They pass admission, policies, breakers, the retry budget and the metrics as others do; neither tokenizer nor session is asked.
What can be tried again, and from where, is ``progress.py``'s affair; how often, ``retry.py``'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from sapwood_common.errors import DeadlineExceededError, InternalError, SapwoodError
from sapwood_router.fleet.circuit_breaker import Outcome, outcome_of
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.attempts import Shared, acquire
from sapwood_router.flow.relay.asked import PATHS, Asked, pseudo_tokens
from sapwood_router.flow.relay.progress import CONTINUE_CHATS, Chunk, Progress, number
from sapwood_router.flow.retry import Failover, RetryPolicy
from sapwood_router.flow.select import choose
from sapwood_router.observe.observer import RequestObserver, RequestWatch
from sapwood_router.request.context import Usage
from sapwood_router.routing.policies.base import PromptPages

if TYPE_CHECKING:
    from sapwood_router.transport.backend.client import Backend

logger = logging.getLogger(__name__)

Send = Callable[[Chunk], Awaitable[None]]
"""Takes the whole answer, or a chunk of it, on to the client; returns once the client is ready for more."""


class Relay:
    """Answers them.

    Args:
        shared: Registry, policies and rules.
        retry: Counts requests for the retry budget.
        observer: Counts and traces requests.
    """

    def __init__(self, shared: Shared, retry: RetryPolicy, observer: RequestObserver) -> None:
        self._shared = shared
        self._retry = retry
        self._observer = observer

    def serves(self, model: str | None) -> bool:
        """Whether a model's requests are to come here."""
        return self._shared.registry.relays(model)

    async def answer(self, asked: Asked, send: Send) -> None:
        """Answers a request. To be cancelled when the client leaves.

        Raises:
            SapwoodError: It failed, or was refused; what was sent before stands.
        """
        context = asked.context
        self._retry.budget.request()
        watch = self._observer.watch(context)
        try:
            context.model = self._shared.registry.resolve_any(context.model)
            async with asyncio.timeout_at(context.deadline):
                await _Relayed(self._shared, asked, watch, send).run()
        except TimeoutError:
            context.error = DeadlineExceededError("the deadline passed")
            raise context.error from None
        except SapwoodError as error:
            context.error = error
            raise
        except Exception as error:
            logger.exception("request %s failed", context.request_id)
            context.error = InternalError(str(error))
            raise context.error from None
        finally:
            watch.close()
            context.error = None  # its traceback refers to the context: a cycle


class _Relayed:
    """One request's tries."""

    def __init__(self, shared: Shared, asked: Asked, watch: RequestWatch, send: Send) -> None:
        self._shared = shared
        self._asked = asked
        self._context = asked.context
        self._watch = watch
        self._send = send
        self._progress = Progress(asked)
        assert asked.context.model is not None, "it was resolved"
        self._model: str = asked.context.model
        caller = asked.context.caller
        self._prompt = PromptPages(pseudo_tokens(asked.body), caller.session, caller.cache_salt)
        self._policy = shared.policies.of(self._model)
        self._failed: SapwoodError | None = None

    async def run(self) -> None:
        context, estimate = self._context, len(self._prompt.token_ids)
        account = context.caller.account
        if account is not None:
            account.take_prompt(context.prompt, estimate)
        await self._turn(estimate)
        failover = self._shared.failover()
        failed: SapwoodError | None = None
        try:
            while not await self._try(failover, failed):
                if self._progress.at_limit:
                    await self._pass_on(self._progress.end_at_limit(), 0)
                    break
                failed = self._failed
                assert failed is not None, "the try failed"
                delay = failover.after(failed, context.worker, context.deadline)
                if delay is None:
                    raise failed
                self._watch.retried(failed)
                logger.info("%s; going on elsewhere", failed.message)
                await asyncio.sleep(delay)
        finally:
            if account is not None:
                account.take_output(self._tokens())
        self._end(estimate)

    def _tokens(self) -> int:
        """The tokens that the backends say they have generated, as far as that can be: a lie must not use up a key's rate."""
        most = self._asked.most_tokens(self._shared.registry.context_length(self._model))
        return self._progress.tokens if most is None else min(most, self._progress.tokens)

    async def _turn(self, tokens: int) -> None:
        """Waits until the request may choose a backend."""
        context = self._context
        with self._watch.stage("queue"):
            place = self._shared.admission.reserve(self._model, context.caller, tokens, context.deadline)
            try:
                if not place.ready():
                    await place.turn()
            finally:
                place.leave()

    async def _try(self, failover: Failover, failed: SapwoodError | None) -> bool:
        """Asks a backend. Returns whether it answered; if not, another may be asked.

        Raises:
            SapwoodError: It failed for good; if no backend is left, ``failed`` is what the last one said.
        """
        context, progress = self._context, self._progress
        registry = self._shared.registry
        refused = failover.refused_by
        if progress.continues:
            refused = refused | {w.address for w in registry.available(self._model) if not _continues(w)}
        with self._watch.stage("select"):
            try:
                demand = Demand(self._model, 0, "model", refused_by=refused, relayed=True)
                worker, choice = choose(demand, self._prompt, registry, self._policy)
            except SapwoodError as error:
                raise failed or error from None
        lease, permit = acquire(worker, choice, self._prompt, self._policy, context.caller.tenant)
        context.worker, context.reason = choice.address, choice.reason
        self._watch.selected(choice.reason)
        if progress.sent:
            context.resumptions += 1
            self._watch.resumed()
        outcome = Outcome.NEUTRAL

        def answers() -> None:
            lease.prefilled()
            permit.end(Outcome.SUCCESS)

        try:
            with self._watch.stage("execute"):
                await (self._stream if self._asked.streams else self._whole)(worker, answers)
            outcome = Outcome.SUCCESS
        except SapwoodError as error:
            outcome = outcome_of(error)
            self._policy.failed(worker.address, _page_size(worker), self._prompt)
            if not progress.may_be_asked_again:
                raise
            self._failed = error.with_traceback(None)
            return False
        finally:
            permit.end(outcome)
            lease.release()
        self._policy.finished(worker.address, _page_size(worker), self._prompt, ())
        return True

    async def _whole(self, worker: Worker, answers: Callable[[], None]) -> None:
        backend, progress = worker.backend, self._progress
        assert backend is not None, "only backends were to be chosen from"
        answer = await backend.whole(PATHS[self._asked.kind], self._body(backend), self._context.request_id)
        answers()
        progress.take_whole(answer)
        worker.generated.add(progress.tokens)
        await self._pass_on([answer | {"model": self._model}], progress.tokens)

    async def _stream(self, worker: Worker, answers: Callable[[], None]) -> None:
        backend, progress = worker.backend, self._progress
        assert backend is not None, "only backends were to be chosen from"
        events = backend.events(PATHS[self._asked.kind], self._body(backend), self._context.request_id)
        try:
            while True:
                try:
                    chunk = await anext(events)
                except StopAsyncIteration:
                    break
                except SapwoodError:
                    if progress.ended:  # only the mark of the end is missing, or a usage
                        break
                    raise
                answers()
                before = progress.tokens
                chunks = progress.take(chunk)
                new = max(0, progress.tokens - before)
                worker.generated.add(new)
                await self._pass_on(chunks, new)
        finally:
            await events.aclose()
        await self._pass_on(progress.end(), 0)

    def _body(self, backend: Backend) -> bytes:
        return msgspec.json.encode(self._progress.body(backend.model, backend.owner))

    async def _pass_on(self, chunks: list[Chunk], tokens: int) -> None:
        context = self._context
        for chunk in chunks:
            started = time.perf_counter()
            if context.first_token is None:
                context.first_token = started
            await self._send(chunk)
            self._watch.delta(started, tokens)

    def _end(self, estimate: int) -> None:
        """Reports the usage from the backend; missing numbers are estimated."""
        context, progress = self._context, self._progress
        prompt = estimate if progress.usage is None else number(progress.usage.get("prompt_tokens"))
        details = (progress.usage or {}).get("prompt_tokens_details")
        context.cached_tokens = number(details.get("cached_tokens")) if isinstance(details, dict) else 0
        context.usage = Usage(prompt, progress.tokens, context.cached_tokens)


def _continues(worker: Worker) -> bool:
    return worker.backend is not None and worker.backend.owner in CONTINUE_CHATS


def _page_size(worker: Worker) -> int:
    assert worker.model is not None, "it was chosen for its model"
    return worker.model.page_size
