"""``POST /embed`` of text-embeddings-inference: a list of vectors and nothing else."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.openai.embeddings import inputs_of
from sapwood_router.edges.openai.types import AnyRequest
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.embed_request import EmbedRequest


class TeiEmbedRequest(AnyRequest, kw_only=True):
    """``POST /embed``; ``model`` is an extension."""

    inputs: Any = None  # as of OpenAI's embeddings
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


async def tei_embed(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, TeiEmbedRequest, {}, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    if request.truncate and request.truncation_direction in ("Left", "left"):
        raise InvalidArgumentError("inputs to embed are cut at their end", field="truncation_direction")
    try:
        inputs, names = inputs_of(request.inputs)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(error.message, field=(error.field or "").replace("input", "inputs", 1)) from error
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=inputs,
        names=[name.replace("input", "inputs", 1) for name in names],
        model=request.model,
        normalize=request.normalize is not False,
        dimensions=request.dimensions,
        prompt_name=request.prompt_name,
        max_tokens=-1 if request.truncate else None,
        deadline=exchange.sooner(deadline),
        caller=exchange.caller(request, given),
    )
    exchange.on_disconnect(lambda: None)
    found = await pipeline.embedder.embed(wanted)
    await exchange.send_body(200, msgspec.json.encode([list(vector) for vector in found.vectors]))
