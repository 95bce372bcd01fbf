"""Embeddings and labels: texts become tokens, and a request's tokens vectors, on one worker after another until all are there.

They pass admission, policy, breaker and retry budget as generations do, and the worker knows whom they are for as it does with
generations. What workers hold of the texts does not decide where they go: one call has many of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from sapwood_common.contract.limits import MOST_EMBEDDED
from sapwood_common.errors import DeadlineExceededError, InvalidArgumentError, SapwoodError
from sapwood_common.status import row_of
from sapwood_common.telemetry.tracing import child_span
from sapwood_router.admission.control import Place
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.flow.attempts import Shared
from sapwood_router.flow.embedding_attempts import EmbeddingAttempts
from sapwood_router.flow.retry import RetryPolicy
from sapwood_router.flow.stages.reserve import CHARACTERS_A_TOKEN
from sapwood_router.observe.observer import RequestObserver
from sapwood_router.observe.spans import CLASSIFICATION, EMBEDDINGS, asked_to_embed, embedded, span_name
from sapwood_router.request.embed_request import Embeddings, EmbedRequest, TextPair
from sapwood_router.request.validation import check_token_ids, check_truncation
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_router.tokenizer.tokenizers import Tokenizers


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
        model = self._shared.registry.resolve(request.model)
        served = self._served(model, request.classifies)
        cost = sum(map(_cost, request.inputs))
        place = self._shared.admission.reserve(model, request.caller, cost, request.deadline)
        try:
            sequences = await self._encode(request, served)
            most = served.context_length if request.max_tokens == -1 else request.max_tokens or 0
            _check_dimensions(request.dimensions, served)
            found = await self._ask(model, request, sequences, most, place)
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
                    raise InvalidArgumentError("it is empty", field=name)
                sequences.append(next(encoded))
            else:
                check_token_ids(item, name)
                sequences.append(item)
        return sequences

    async def _ask(
        self, model: str, request: EmbedRequest, sequences: list[list[int]], max_tokens: int, place: Place
    ) -> Embeddings:
        if request.caller.account is not None:
            request.caller.account.take_prompt(sequences, sum(map(len, sequences)))
        self._retry.budget.request()
        attempts = EmbeddingAttempts(self._shared, model, request, sequences, max_tokens, self._metrics)
        try:
            async with asyncio.timeout_at(request.deadline):
                return await attempts.run(place)
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed") from None
        finally:
            attempts.close()


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
    """The tokens of each pair. What looks like a special token in a text is text: such tokens tell where a text ends.

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
