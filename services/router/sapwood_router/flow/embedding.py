"""Embeddings: texts become tokens, and the tokens of one request go to one worker together.

They pass admission, policy, breaker and retry budget as generations do, and the worker knows whom they are for as it does with
generations. What workers hold of the texts does not decide where they go: one call has many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc

from sapwood.v1 import worker_pb2
from sapwood_common.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.network.channel import request_metadata
from sapwood_common.status import from_rpc_error, row_of
from sapwood_common.telemetry.tracing import child_span
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.fleet.convert import to_embed_request
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.outcome import Outcome, WorkerLostError, outcome_of
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.resume import Failover
from sapwood_router.flow.retry import RetryPolicy
from sapwood_router.flow.stages.reserve import CHARACTERS_A_TOKEN
from sapwood_router.observe.observer import RequestObserver
from sapwood_router.observe.spans import EMBEDDINGS, asked_to_embed, embedded, span_name
from sapwood_router.request.embed_request import Embeddings, EmbedRequest
from sapwood_router.request.validation import MAX_EMBEDDED, check_token_ids, check_truncation
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.tokenizer.tokenizers import Tokenizers

logger = logging.getLogger(__name__)

_NOT_CACHED = "embeddings"
"""A cache salt that no worker caches under: to a policy that goes by what workers hold, nobody holds the prompt."""
_NOTICED = 0.05
"""Seconds within which the session of a worker that is lost ends, too."""


class Embedder:
    """Embeds.

    Args:
        tokenizers: Encode texts.
        registry: Knows the workers.
        admission: Where requests wait for one.
        policies: Choose one.
        retry: Counts requests for the retry budget.
        failover: Makes each request's account of failures.
        resume_grace: Seconds that a request whose worker was lost waits for another to come up.
        observer: Counts and traces requests.
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
    ) -> None:
        self._tokenizers = tokenizers
        self._registry = registry
        self._admission = admission
        self._policies = policies
        self._retry = retry
        self._failover = failover
        self._resume_grace = resume_grace
        self._metrics = observer.metrics
        self._tracing = observer.tracing

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """The vectors of all inputs. Raises as :meth:`_embed`."""
        code, model, tokens = "CANCELLED", "-", 0
        try:
            found = await self._traced(request)
            code, model, tokens = "OK", found.model, found.prompt_tokens
            return found
        except SapwoodError as error:
            code = row_of(error).grpc.name
            raise
        finally:
            tenant = request.caller.tenant or "-"
            self._metrics.embeddings.at(model=model, code=code).inc()
            self._metrics.tenant_requests.at(tenant=tenant, code=code).inc()
            self._metrics.tenant_tokens.at(tenant=tenant).inc(tokens)

    async def _traced(self, request: EmbedRequest) -> Embeddings:
        attributes = asked_to_embed(request) if self._tracing.on else None
        with child_span(self._tracing, span_name(EMBEDDINGS, request.model), "client", attributes) as span:
            found = await self._embed(request)
            if self._tracing.on:
                span.rename(span_name(EMBEDDINGS, found.model))
                for name, value in embedded(found).items():
                    span.set(name, value)
            return found

    async def _embed(self, request: EmbedRequest) -> Embeddings:
        """The vectors of all inputs.

        Raises:
            InvalidArgumentError: An input is empty or too long, or the model makes no embeddings; the field is the client's.
            NotFoundError: There is no such model.
            UnavailableError: No worker is left.
            ResourceExhaustedError: The tenant's rate is used up, or the request would wait too long.
            SapwoodError: As the tokenizer or the worker answers.
        """
        if not request.inputs:
            raise InvalidArgumentError("there is nothing to embed", field="input")
        if len(request.inputs) > MAX_EMBEDDED:
            raise InvalidArgumentError(f"at most {MAX_EMBEDDED} inputs, got {len(request.inputs)}", field="input")
        if request.max_tokens is not None:
            check_truncation(request.max_tokens)
        model = self._registry.resolve(request.model)
        served = self._served(model)
        cost = sum(len(item) // CHARACTERS_A_TOKEN if isinstance(item, str) else len(item) for item in request.inputs)
        place = self._admission.reserve(model, request.caller, cost, request.deadline)
        try:
            sequences = await self._encode(request)
            most = served.context_length if request.max_tokens == -1 else request.max_tokens or 0
            _check_dimensions(request.dimensions, served)
            answer = await self._ask(model, request, sequences, most, place)
        finally:
            place.leave()
        return Embeddings(model, [item.values for item in answer.embeddings], answer.prompt_tokens)

    def _served(self, model: str) -> ServedModel:
        """What a worker that could embed something serves; nothing is encoded if there is none."""
        demand = Demand(model, 0, "input", embeds=True)
        served = eligible(self._registry.available(model), demand).workers[0].model
        assert served is not None
        return served

    async def _encode(self, request: EmbedRequest) -> list[list[int]]:
        texts = [item for item in request.inputs if isinstance(item, str)]
        client = self._tokenizers.of(request.model).client
        salt = request.caller.cache_salt
        encoded = iter(await client.encode_texts(texts, request.request_id, request.deadline, salt) if texts else ())
        sequences = []
        for name, item in zip(request.names, request.inputs, strict=True):
            if isinstance(item, str):
                if not item:
                    raise InvalidArgumentError("it is empty", field=name)
                sequences.append(next(encoded))
            else:
                check_token_ids(item, name)
                sequences.append(item)
        return sequences

    async def _ask(
        self, model: str, request: EmbedRequest, sequences: list[list[int]], max_tokens: int, place: Place
    ) -> worker_pb2.WorkerEmbedResponse:
        message = to_embed_request(request, sequences, max_tokens)
        tokens = sum(map(len, sequences))
        if request.caller.account is not None:
            request.caller.account.take_prompt(sequences, tokens)
        self._retry.budget.request()
        if not place.ready():
            await place.turn()
        prompt = PromptPages(sequences[0], request.caller.session, _NOT_CACHED)
        name, longest = max(zip(request.names, sequences, strict=True), key=lambda item: len(item[1]))
        failover = self._failover()
        demand = Demand(model, 0 if max_tokens else len(longest), name, embeds=True, refused_by=failover.refused_by)
        last: SapwoodError | None = None
        while True:
            worker = await self._next(demand, prompt, last, request.deadline)
            try:
                return await self._try(worker, message, tokens, request)
            except SapwoodError as error:
                delay = failover.after(error, worker.address, request.deadline)
                if delay is None:
                    raise
                logger.info("worker %s: %s; trying another", worker.address, error.message)
                self._metrics.retries.at(code=row_of(error).grpc.name).inc()
                last = error
            await asyncio.sleep(delay)

    async def _next(self, demand: Demand, prompt: PromptPages, last: SapwoodError | None, deadline: float) -> Worker:
        """Chooses a worker; after a loss, waits for one if there is none."""
        loop = asyncio.get_running_loop()
        give_up = min(loop.time() + self._resume_grace, deadline)
        while True:
            changed = self._registry.changed
            try:
                return self._select(demand, prompt)
            except SapwoodError as error:
                left = give_up - loop.time()
                if not isinstance(last, WorkerLostError) or left <= 0:
                    raise last or error from None  # what a worker said tells the client more than that none is left
                with contextlib.suppress(TimeoutError):  # a breaker's time passes without a change
                    await asyncio.wait_for(changed.wait(), min(left, 0.25))

    def _select(self, demand: Demand, prompt: PromptPages) -> Worker:
        workers = eligible(self._registry.available(demand.model), demand).workers
        choice = self._policies.of(demand.model).choose([worker.view() for worker in workers], prompt)
        self._metrics.selections.at(reason=choice.reason).inc()
        return next(worker for worker in workers if worker.address == choice.address)

    async def _try(
        self, worker: Worker, message: worker_pb2.WorkerEmbedRequest, tokens: int, request: EmbedRequest
    ) -> worker_pb2.WorkerEmbedResponse:
        timeout = request.deadline - asyncio.get_running_loop().time()
        if timeout <= 0:
            raise DeadlineExceededError("the deadline passed before a worker was called")
        stub = worker.stub
        if stub is None:
            raise UnavailableError(f"worker {worker.address} is not connected", retry_after=1.0)
        lease, permit = worker.lease(tokens), worker.breaker.begin()
        try:
            answer = await stub.Embed(message, timeout=timeout, metadata=request_metadata(request.request_id))
            permit.end(Outcome.SUCCESS)
            return answer
        except grpc.aio.AioRpcError as failure:
            told = from_rpc_error(failure)
            if isinstance(told, UnavailableError):
                await asyncio.sleep(_NOTICED)
                if worker.stub is not stub:  # it did not say so: it is gone, with all that ran there
                    told = WorkerLostError(f"worker {worker.address} was lost", retry_after=1.0)
            permit.end(outcome_of(told))
            raise told from failure
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The channel was closed under the call: the worker's session is over.
            raise WorkerLostError(f"worker {worker.address} was lost", retry_after=1.0) from error
        finally:
            permit.end(Outcome.NEUTRAL)
            lease.release()


def _check_dimensions(wanted: int | None, served: ServedModel) -> None:
    """Refuses a number of dimensions that the model's vectors are not cut to."""
    if wanted is None or wanted == served.embedding_size:
        return
    if served.shortened is None:
        problem = f"the model's embeddings have {served.embedding_size} dimensions, and its files do not say that fewer will do"
    elif not 0 < wanted < served.embedding_size or (served.shortened and wanted not in served.shortened):
        allowed = ", ".join(map(str, sorted(served.shortened))) or f"1..{served.embedding_size}"
        problem = f"dimensions must be {allowed}, got {wanted}"
    else:
        return
    raise InvalidArgumentError(problem, field="dimensions")
