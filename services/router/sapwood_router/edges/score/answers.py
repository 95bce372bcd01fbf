"""``/score`` and ``/rerank``, shaped as in vLLM; the second also takes what Jina's and Cohere's clients send."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, TypeVar

import msgspec

from sapwood_common.contract.limits import MOST_EMBEDDED
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import Neutral, convert, decode_object
from sapwood_router.edges.openai.types import AnyRequest
from sapwood_router.edges.score.types import CompareRequest
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.caller import Caller
from sapwood_router.request.embed_request import Embeddings, EmbedRequest, TextPair

NEUTRAL: Neutral = {"softmax": (), "mm_processor_kwargs": ({},), "add_special_tokens": (True,)}
IGNORED = frozenset({"user"})


RequestT = TypeVar("RequestT", bound=CompareRequest)
_LISTS = frozenset({"text_1", "text_2", "data_1", "data_2", "queries", "documents", "items", "texts"})
"""Parameters that may be lists of texts."""


class ScoreRequest(CompareRequest, kw_only=True):
    """One text and others, or as many of the one as of the other, by one of the pairs of names that versions of vLLM have."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None


_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""The names of the one and of the other, the usual ones first."""


class Score(msgspec.Struct):
    """How well the texts of a pair fit each other."""

    index: int
    score: float
    object: str = "score"


class ScoreUsage(msgspec.Struct):
    """``usage``; a text that is in several pairs counts once."""

    prompt_tokens: int
    total_tokens: int


class ScoreResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/score``."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class Document(msgspec.Struct):
    """A text to rank."""

    text: str


class RerankRequest(CompareRequest, kw_only=True):
    """A text, and those to order by how well they fit it; the last are what text-embeddings-inference calls it."""

    query: str
    documents: list[str | Document] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None


class Ranked(msgspec.Struct):
    """A document and how well it fits the query; ``index`` is its place in the request."""

    index: int
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


class PlainRanked(msgspec.Struct):
    """The same, as text-embeddings-inference tells it: its answer is a list of these."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    """The answer of ``/rerank``, the best first."""

    id: str
    model: str
    usage: ScoreUsage
    results: list[Ranked]


async def score(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = checked(exchange, given, ScoreRequest)
    caller, deadline = exchange.caller(request, given), exchange.sooner(deadline)
    values = msgspec.structs.asdict(request)
    given_names = {name for name in _LISTS if values.get(name) is not None}
    one, other = next((pair for pair in _PAIRS if not given_names.isdisjoint(pair)), _PAIRS[0])
    if one == "queries" and other not in given_names and "items" in given_names:
        other = "items"
    for name in (one, other):
        if name not in given_names:
            raise InvalidArgumentError(f"{name} is required", field=name)
    ones, others = _named(values[one], one), _named(values[other], other)
    if len(ones) not in (1, len(others)):
        raise InvalidArgumentError(
            f"{one} must be one text or as many as {other}: {len(others)}, got {len(ones)}", field=one
        )
    found = await compare(exchange, pipeline, request, ones, others, caller, deadline)
    answer = ScoreResponse(
        id=f"score-{exchange.request_id}",
        created=int(time.time()),
        model=found.model,
        data=[Score(index, value) for index, value in enumerate(found.scores)],
        usage=ScoreUsage(found.prompt_tokens, found.prompt_tokens),
    )
    await exchange.send_body(200, msgspec.json.encode(answer))


async def rerank(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = checked(exchange, given, RerankRequest)
    caller, deadline = exchange.caller(request, given), exchange.sooner(deadline)
    if request.top_n is not None and request.top_n < 0:
        raise InvalidArgumentError(f"top_n must be at least 0, got {request.top_n}", field="top_n")
    plain = request.texts is not None
    if plain and request.documents is not None:
        raise InvalidArgumentError("set documents or texts, not both", field="texts")
    if request.documents is None and not plain:
        raise InvalidArgumentError("documents is required", field="documents")
    texts = request.texts or [item if isinstance(item, str) else item.text for item in request.documents or ()]
    query, documents = [("query", request.query)], _named(texts, "texts" if plain else "documents")
    if request.raw_scores and request.uses_activation is None and labelled(pipeline, request):
        request.use_activation = False
    if request.truncate and request.truncate_prompt_tokens is None:
        request.truncate_prompt_tokens = -1
    found = await compare(exchange, pipeline, request, query, documents, caller, deadline)
    scores = found.scores
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    if plain:
        rows = [
            PlainRanked(index, scores[index], texts[index] if request.return_text else msgspec.UNSET) for index in order
        ]
        await exchange.send_body(200, msgspec.json.encode(rows))
        return
    shows = request.return_documents is not False
    answer = RerankResponse(
        id=f"rerank-{exchange.request_id}",
        model=found.model,
        usage=ScoreUsage(found.prompt_tokens, found.prompt_tokens),
        results=[Ranked(index, scores[index], Document(texts[index]) if shows else msgspec.UNSET) for index in order],
    )
    await exchange.send_body(200, msgspec.json.encode(answer))


def labelled(pipeline: Pipeline, request: CompareRequest) -> bool:
    """Whether the model that a request means has a head that classifies."""
    return pipeline.registry.labels(pipeline.registry.resolve(request.model)) is not None


def checked(exchange: Exchange, given: dict[str, Any], cls: type[RequestT]) -> RequestT:
    """The request that a body asks for.

    Raises:
        InvalidArgumentError: It is wrong; the parameter is named.
    """
    for name in _LISTS & given.keys():  # before each of them is looked at
        count = len(given[name]) if isinstance(given[name], list) else 1
        if count > MOST_EMBEDDED:
            raise InvalidArgumentError(f"at most {MOST_EMBEDDED} texts, got {count}", field=name)
    request = convert(given, cls, NEUTRAL, IGNORED, left_out=exchange.left_out)
    if request.truncation_side == "left":
        raise InvalidArgumentError("inputs to embed are cut at their end", field="truncation_side")
    exchange.accept_body_id(request)
    return request


def _named(texts: str | Sequence[str], name: str) -> list[tuple[str, str]]:
    """Texts and the client's name of each."""
    if isinstance(texts, str):
        return [(name, texts)]
    if not texts:
        raise InvalidArgumentError(f"there is no text in {name}", field=name)
    return [(f"{name}[{index}]", text) for index, text in enumerate(texts)]


@dataclass(frozen=True, slots=True)
class Compared:
    """A score for each pair, and the usage."""

    model: str
    scores: list[float]
    prompt_tokens: int


async def compare(
    exchange: Exchange,
    pipeline: Pipeline,
    request: CompareRequest,
    ones: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
    caller: Caller,
    deadline: float,
) -> Compared:
    """The scores of pairs: of one text with each of the others, or of as many pair by pair.

    Args:
        exchange: Whose answer it is for.
        pipeline: Runs the request.
        request: What the client asked.
        ones: Each text with the client's name of it; one, or as many as ``others``.
        others: The same of the second texts.
        caller: Who asks.
        deadline: On the event loop's clock.

    Raises:
        SapwoodError: A text is empty or too long, there are too many, or the model cannot compare, or it failed.
    """
    labels = pipeline.registry.labels(pipeline.registry.resolve(request.model))
    if labels is None:
        if request.uses_activation is not None:
            name = "activation" if request.use_activation is None else "use_activation"
            raise InvalidArgumentError(f"{name} is for models with a head that classifies", field=name)
        found = await embed_all(exchange, pipeline, request, [*ones, *others], caller, deadline)
        first, second = found.vectors[: len(ones)], found.vectors[len(ones) :]
        if len(first) == 1:
            first *= len(second)
        scores = await cosines(list(zip(first, second, strict=True)))
        return Compared(found.model, scores, found.prompt_tokens)
    if len(labels.names) != 1:
        raise InvalidArgumentError(
            f"the model tells {len(labels.names)} labels: ask /classify; a score needs a model with one", field="model"
        )
    for name, text in (*ones, *others):
        if not text:
            raise InvalidArgumentError("it is empty", field=name)
    exchange.on_disconnect(lambda: None)
    firsts = [text for _, text in ones] * (len(others) if len(ones) == 1 else 1)
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=[TextPair(one, text) for one, (_, text) in zip(firsts, others, strict=True)],
        names=[name for name, _ in others],
        model=request.model,
        max_tokens=request.truncate_prompt_tokens,
        deadline=deadline,
        caller=caller,
        classifies=True,
    )
    answer = await pipeline.embedder.embed(wanted)
    used_labels = answer.labels if answer.labels is not None and request.uses_activation is not False else None
    scores = [(logits if used_labels is None else used_labels.scores(logits))[0] for logits in answer.vectors]
    return Compared(answer.model, scores, answer.prompt_tokens)


_AT_ONCE = 64
"""Cosines between two looks at what else there is to do."""


async def embed_all(
    exchange: Exchange,
    pipeline: Pipeline,
    request: AnyRequest,
    named: Sequence[tuple[str, str]],
    caller: Caller,
    deadline: float,
) -> Embeddings:
    """The vectors of texts, each with the client's name of the text.

    Raises:
        SapwoodError: A text is empty or too long, there are too many, or the model makes no embeddings, or it failed.
    """
    if len(named) > MOST_EMBEDDED:
        raise InvalidArgumentError(f"at most {MOST_EMBEDDED} texts, got {len(named)}", field=named[-1][0])
    exchange.on_disconnect(lambda: None)
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=[text for _, text in named],
        names=[name for name, _ in named],
        model=request.model,
        normalize=True,
        max_tokens=request.truncate_prompt_tokens,
        deadline=deadline,
        caller=caller,
    )
    return await pipeline.embedder.embed(wanted)


async def cosines(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[float]:
    """How alike the vectors of each pair are, -1 to 1; a vector of zeros is like none."""
    found = []
    for index, (one, other) in enumerate(pairs):
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        lengths = math.hypot(*one) * math.hypot(*other)
        found.append(sum(map(mul, one, other)) / lengths if lengths else 0.0)
    return found
