"""Embeddings and labels: texts become tokens, and a request's tokens vectors, on one worker after another until all are there.

They pass admission, policy, breaker and retry budget as generations do, and the worker knows whom they are for as it does with
generations. What workers hold of the texts does not decide where they go: one call has many of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from sapwood.v1 import worker_pb2
from sapwood_common.contract.limits import MOST_EMBEDDED
from sapwood_common.errors import DeadlineExceededError, InternalError, InvalidArgumentError, SapwoodError
from sapwood_common.status import row_of
from sapwood_common.telemetry.tracing import child_span
from sapwood_router.admission.control import Place
from sapwood_router.fleet.circuit_breaker import Outcome, Permit
from sapwood_router.fleet.convert import to_embed_request
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.session import MOST_TOKENS
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.flow.attempts import Attempt, Attempts, Shared
from sapwood_router.flow.prepare import CHARACTERS_A_TOKEN
from sapwood_router.flow.retry import RetryPolicy
from sapwood_router.flow.select import choose
from sapwood_router.observe.metrics import RouterMetrics
from sapwood_router.observe.observer import (
    CLASSIFICATION,
    EMBEDDINGS,
    RequestObserver,
    asked_to_embed,
    embedded,
    span_name,
)
from sapwood_router.request.embed_request import Embeddings, EmbedRequest, TextPair
from sapwood_router.request.validation import check_token_ids, check_truncation
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_router.tokenizer.text_stream import Tokenizers
from sapwood_router.transport.shared_call import TOKENS_A_MESSAGE


class Embedder:
    """Embeds.

    Args:
        shared: Registry, policies and rules.
        tokenizers: Encode texts.
        retry: Counts requests for the retry budget.
        observer: Counts and traces requests.
    """

    def __init__(self, shared: Shared, tokenizers: Tokenizers, retry: RetryPolicy, observer: RequestObserver) -> None:
        self._shared = shared
        self._tokenizers = tokenizers
        self._retry = retry
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
        kind = CLASSIFICATION if request.classifies else EMBEDDINGS
        with child_span(self._tracing, span_name(kind, request.model), "client", attributes) as span:
            found = await self._embed(request)
            if self._tracing.on:
                span.rename(span_name(kind, found.model))
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
        if len(request.inputs) > MOST_EMBEDDED:
            raise InvalidArgumentError(f"at most {MOST_EMBEDDED} inputs, got {len(request.inputs)}", field="input")
        if request.max_tokens is not None:
            check_truncation(request.max_tokens)
        registry = self._shared.registry
        model, named = registry.resolve(request.model), registry.lora_of(request.model)
        if request.lora not in ("", named or request.lora):
            raise InvalidArgumentError(f"model names the adapter {named!r}, lora_name another", field="lora_name")
        lora = request.lora or named
        if lora:
            registry.check_lora(model, lora)
            registry.loras.asked(model, lora)
        served = self._served(model, request.classifies)
        cost = sum(map(_cost, request.inputs))
        place = self._shared.admission.reserve(model, request.caller, cost, request.deadline)
        try:
            sequences = await self._encode(request, served)
            most = served.context_length if request.max_tokens == -1 else request.max_tokens or 0
            _check_dimensions(request.dimensions, served)
            found = await self._ask(model, lora, request, sequences, most, place)
            if lora:
                found = replace(found, model=request.model if named and request.model else lora)
            return replace(found, labels=served.labels) if request.classifies else found
        finally:
            place.leave()

    def _served(self, model: str, classifies: bool) -> ServedModel:
        """What a worker that could answer serves; nothing is encoded if there is none."""
        demand = Demand(model, 0, "input", embeds=True, classifies=classifies)
        served = eligible(self._shared.registry.available(model), demand).workers[0].model
        assert served is not None
        return served

    async def _encode(self, request: EmbedRequest, served: ServedModel) -> list[list[int]]:
        texts = [item for item in request.inputs if isinstance(item, str)]
        client = self._tokenizers.of(request.model).client
        salt = request.caller.cache_salt
        most_tokens = None  # the worker cuts them
        if request.max_tokens is None and not served.embedded_tokens:
            most_tokens = partial(self._shared.registry.context_length, served.model)
        encoded: Iterator[list[int]] = iter(())
        if texts:
            before = "" if request.classifies else await _prompt(client, request)
            texts = [before + text if text else text for text in texts]
            own = request.request_id, request.deadline, salt
            encoded = map(list, await client.encode_texts(texts, *own, most_tokens=most_tokens))
        pairs = [item for item in request.inputs if isinstance(item, TextPair)]
        joined = iter(await encode_pairs(client, pairs, request) if pairs else ())
        sequences = []
        for name, item in zip(request.names, request.inputs, strict=True):
            if isinstance(item, TextPair):
                sequences.append(next(joined))
            elif isinstance(item, str):
                if not item:
                    raise InvalidArgumentError("it is empty; it needs a text of one letter at least", field=name)
                sequences.append(next(encoded))
            else:
                check_token_ids(item, name)
                sequences.append(item)
        return sequences

    async def _ask(
        self, model: str, lora: str, request: EmbedRequest, sequences: list[list[int]], max_tokens: int, place: Place
    ) -> Embeddings:
        if request.caller.account is not None:
            request.caller.account.take_prompt(sequences, sum(map(len, sequences)))
        self._retry.budget.request()
        attempts = EmbeddingAttempts(self._shared, model, lora, request, sequences, max_tokens, self._metrics)
        try:
            async with asyncio.timeout_at(request.deadline):
                return await attempts.run(place)
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed") from None
        finally:
            attempts.stop()


async def _prompt(client: TokenizerClient, request: EmbedRequest) -> str:
    """The text to put before each that is embedded.

    Raises:
        InvalidArgumentError: The model has no prompt of the request's name.
    """
    if request.prompt_name == "":
        return ""
    prompts = (await client.info(request.request_id, request.deadline)).prompts
    name = prompts.default if request.prompt_name is None else request.prompt_name
    if name and name not in prompts.texts:
        known = ", ".join(sorted(prompts.texts)) or "none"
        raise InvalidArgumentError(f"the model has no prompt {name!r}; it has {known}", field="prompt_name")
    return prompts.texts.get(name, "")


def _cost(item: str | list[int] | TextPair) -> int:
    """About how many tokens an input has."""
    if isinstance(item, list):
        return len(item)
    return len(item) // CHARACTERS_A_TOKEN if isinstance(item, str) else sum(map(len, item)) // CHARACTERS_A_TOKEN


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


# Pairs of texts become sequences of tokens, as the model's tokenizer joins them; a text of many pairs is encoded once.
async def encode_pairs(client: TokenizerClient, pairs: Sequence[TextPair], request: EmbedRequest) -> list[list[int]]:
    """The tokens of each pair. Text that looks like a special token is text: real special tokens mark the end of a text.

    Args:
        client: The model's tokenizer.
        pairs: The request's.
        request: Whose they are.

    Raises:
        InvalidArgumentError: The tokenizer joins no pairs.
        SapwoodError: As the tokenizer answers.
    """
    template = (await client.info(request.request_id, request.deadline)).pair
    if template is None:
        raise InvalidArgumentError("the model's tokenizer does not say how two texts are joined", field="model")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    salt = request.caller.cache_salt
    encoded = await client.encode_texts(texts, request.request_id, request.deadline, salt, bare=True)
    tokens = dict(zip(texts, encoded, strict=True))
    return [
        [*template.before, *tokens[pair.first], *template.between, *tokens[pair.second], *template.after]
        for pair in pairs
    ]


_NOT_CACHED = "embeddings"
"""A cache salt that no worker caches under: to policies that look for cached prefixes, no worker holds any of the prompt."""


class EmbeddingAttempts(Attempts):
    """An embedding request's tries. Parts that a worker answered are not asked for again.

    Args:
        shared: Registry, policy and rules.
        model: Which workers it may go to.
        lora: The adapter; empty: none.
        request: What its client asked.
        sequences: The tokens of each input; at least one.
        max_tokens: The worker cuts longer inputs to this many tokens; 0: to the length in the model's files.
        metrics: Counts choices and retries.

    Raises:
        InvalidArgumentError: An input is larger than a message may be.
    """

    def __init__(
        self,
        shared: Shared,
        model: str,
        lora: str,
        request: EmbedRequest,
        sequences: Sequence[list[int]],
        max_tokens: int,
        metrics: RouterMetrics,
    ) -> None:
        super().__init__(shared, request.request_id, request.deadline)
        self._request = request
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._parts = _parts(sequences, request.names)
        self._prompt = PromptPages(sequences[0], request.caller.session, _NOT_CACHED)
        name, longest = max(zip(request.names, sequences, strict=True), key=lambda item: len(item[1]))
        tokens = 0 if max_tokens else len(longest)
        self._demand = Demand(model, tokens, name, embeds=True, classifies=request.classifies, lora=lora)
        self._vectors: list[Sequence[float]] = []
        self._tokens = 0
        self._answer: asyncio.Future[Embeddings] = asyncio.get_running_loop().create_future()

    async def run(self, place: Place) -> Embeddings:
        """All vectors. The caller stops this, however it ends.

        Args:
            place: The request's.

        Raises:
            SapwoodError: There is no way on.
        """
        self._begin(place)
        return await self._answer

    def _choose(self) -> tuple[Worker, Choice]:
        shared, demand = self._shared, structs.replace(self._demand, refused_by=self._refused_by)
        worker, choice = choose(demand, self._prompt, shared.registry, shared.policies.of(demand.model))
        self._metrics.selections.at(reason=choice.reason).inc()
        return worker, choice

    def _acquire(self, worker: Worker, choice: Choice) -> Attempt:
        part = self._parts[0]
        permit = worker.breaker.begin()
        lease = worker.lease(sum(map(len, part)), self._request.caller.tenant, embeds=True)
        return Gathering(self, len(part), lease, permit)

    def _send(self, worker: Worker, attempt: Attempt) -> None:
        message = to_embed_request(self._request, self._parts[0], self._max_tokens)
        if self._demand.lora:
            message.lora_name = self._demand.lora
            lora = self._shared.registry.loras.find(self._demand.model, self._demand.lora)
            if lora is not None:
                message.lora_source.path, message.lora_source.version = lora.path, lora.version
        attempt.send(message, worker, self._deadline)

    def answered(self, vectors: list[Sequence[float]], tokens: int) -> None:
        """A part is there."""
        self._vectors += vectors
        self._tokens += tokens
        del self._parts[0]
        if self._parts:
            self._do(self._next_part)
        elif not self._answer.done():
            self._answer.set_result(Embeddings(self._demand.model, self._vectors, self._tokens))

    async def _next_part(self) -> None:
        self._try(*await self._another(None))

    def _goes_on(self, error: SapwoodError) -> bool:
        self._metrics.retries.at(code=row_of(error).grpc.name).inc()
        return True

    def _fail_with(self, error: SapwoodError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)


class Gathering(Attempt):
    """One worker's try at embedding something: its vectors come in parts.

    Args:
        owner: The request; it gets all vectors, and the number of tokens that were embedded, when the try is over.
        count: Vectors asked for.
        lease, permit: See Attempt.
    """

    def __init__(self, owner: EmbeddingAttempts, count: int, lease: Lease, permit: Permit) -> None:
        super().__init__(owner, lease, permit)
        self._request = owner
        self._count = count
        self._vectors: list[Sequence[float]] = []

    def vectors(self, part: worker_pb2.WorkerEmbedResponse) -> None:
        if not self._begun:
            self._answers()
        self._vectors.extend(item.values for item in part.embeddings)
        if not part.prompt_tokens:
            return
        if len(self._vectors) != self._count:
            self.failed(InternalError(f"the worker answered {len(self._vectors)} vectors for {self._count} inputs"))
            return
        self._end(Outcome.SUCCESS, None)
        self._request.answered(self._vectors, part.prompt_tokens)


def _parts(sequences: Sequence[list[int]], names: Sequence[str]) -> list[list[list[int]]]:
    """The sequences in their order, as many together as go in one message."""
    parts: list[list[list[int]]] = []
    room = 0
    for sequence, name in zip(sequences, names, strict=True):
        if len(sequence) > MOST_TOKENS:
            raise InvalidArgumentError(f"an input of {len(sequence)} tokens: more than a message may have", field=name)
        if not parts or len(sequence) > room:
            parts.append([])
            room = TOKENS_A_MESSAGE
        parts[-1].append(sequence)
        room -= len(sequence)
    return parts
