"""``/classify``, shaped as in vLLM: which label fits a text."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from sapwood_common.errors import InternalError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import decode_object
from sapwood_router.edges.openai.embeddings import EmbeddingUsage, inputs_of
from sapwood_router.edges.score.answers import checked
from sapwood_router.edges.score.types import CompareRequest
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.embed_request import EmbedRequest

_AT_ONCE = 64
"""Inputs between two looks at what else there is to do."""


class ClassifyRequest(CompareRequest, kw_only=True):
    """Texts or token sequences."""

    input: Any = None  # a string, strings, token ids or lists of token ids


class Classified(msgspec.Struct):
    """Which label fits an input best, and the scores of all in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage


async def classify(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = checked(exchange, given, ClassifyRequest)
    inputs, names = inputs_of(request.input)
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=inputs,
        names=names,
        model=request.model,
        max_tokens=request.truncate_prompt_tokens,
        deadline=exchange.sooner(deadline),
        caller=exchange.caller(request, given),
        classifies=True,
    )
    exchange.on_disconnect(lambda: None)
    found = await pipeline.embedder.embed(wanted)
    labels = found.labels
    if labels is None:
        raise InternalError("the worker's labels are not known")
    data = []
    for index, logits in enumerate(found.vectors):
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        scores = list(logits) if request.uses_activation is False else labels.scores(logits)
        best = max(range(len(scores)), key=scores.__getitem__)
        data.append(Classified(index, labels.names[best], scores, len(scores)))
    answer = ClassifyResponse(
        id=f"classify-{exchange.request_id}",
        created=int(time.time()),
        model=found.model,
        data=data,
        usage=EmbeddingUsage(found.prompt_tokens, found.prompt_tokens),
    )
    await exchange.send_body(200, msgspec.json.encode(answer))
