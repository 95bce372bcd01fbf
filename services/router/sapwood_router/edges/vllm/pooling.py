"""``POST /pooling``, shaped as in vLLM: what a model's pooler tells of a text, a vector or the scores of its labels."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.openai.embeddings import EmbeddingUsage, encoder_of, read, vectors_of
from sapwood_router.flow.generation import Pipeline


class PooledInput(msgspec.Struct):
    """What is told of an input."""

    index: int
    data: Any
    object: str = "pooling"


class Pooled(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledInput]
    usage: EmbeddingUsage


async def pool(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    request, given = await read(exchange, body)
    labels = pipeline.registry.labels(pipeline.registry.resolve(request.model))
    found = await vectors_of(request, given, exchange, pipeline, deadline, classifies=labels is not None)
    vectors = found.vectors if labels is None else [labels.scores(logits) for logits in found.vectors]
    encode = encoder_of(request)
    answer = Pooled(
        id=f"pool-{exchange.request_id}",
        created=int(time.time()),
        model=found.model,
        data=[PooledInput(index, encode(vector)) for index, vector in enumerate(vectors)],
        usage=EmbeddingUsage(found.prompt_tokens, found.prompt_tokens),
    )
    await exchange.send_body(200, msgspec.json.encode(answer))
